// The canvas of lanes over time: raster of spans, curves of memory, names, axis, and what stands out.
import type { Report } from "../data/report";
import type { Store } from "../state";
import { duration } from "../ui/format";
import type { Surface, Themes } from "../ui/theme";
import { drawMemory } from "../memory/curves";
import { ticks } from "./axis";
import type { Tick } from "./axis";
import type { Head, Lane, Layout } from "./lanes";
import { Lanes } from "./lanes";
import { drawNames } from "./names";
import { drawOverlay } from "./overlay";
import { mix, Palette, pixel } from "./palette";
import { Raster } from "./raster";
import type { Viewport } from "./viewport";

export const GUTTER = 168;
export const AXIS = 26;
const FONT = '11px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';
const BOLD = `600 ${FONT}`;
const MOST_FRAMES = 2000;

export class Picture {
  readonly canvas: HTMLCanvasElement;
  layout: Layout = { lanes: [], heads: [], height: 0 };
  scroll = 0;
  width = 0;
  height = 0;
  /** Milliseconds that each of the last frames took to draw. */
  readonly frames: number[] = [];
  palette: Palette;
  pathFlags: Map<number, Uint8Array[]> = new Map();
  private readonly lanes: Lanes;
  private image: ImageData | null = null;
  private raster = new Raster(1);
  private asked = false;

  constructor(
    readonly report: Report,
    readonly store: Store,
    readonly themes: Themes,
    readonly viewport: Viewport,
    readonly mode: "timeline" | "memory",
  ) {
    this.canvas = document.createElement("canvas");
    this.canvas.className = "picture";
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("aria-label", `${mode} of all ranks`);
    this.lanes = new Lanes(report);
    this.palette = this.newPalette();
    store.on((changed) => {
      if (changed.has("microbatch") || changed.has("directive")) this.palette = this.newPalette();
      if (changed.has("path")) this.pathFlags.clear();
      if (changed.has("paired")) this.resize();
      this.ask();
    });
    themes.onChange(() => {
      this.palette = this.newPalette();
      this.ask();
    });
  }

  private newPalette(): Palette {
    const { microbatch, directive } = this.store.state;
    return new Palette(this.report.styles, this.themes.surface, { microbatch, directive });
  }

  get surface(): Surface {
    return this.themes.surface;
  }

  resize(): void {
    const box = this.canvas.parentElement?.getBoundingClientRect();
    if (!box || !box.width) return;
    const ratio = devicePixelRatio || 1;
    this.width = Math.floor(box.width);
    this.height = Math.floor(box.height);
    this.canvas.width = this.width * ratio;
    this.canvas.height = this.height * ratio;
    this.canvas.style.width = `${this.width}px`;
    this.canvas.style.height = `${this.height}px`;
    this.layout = this.lanes.fitted(this.mode, this.store.state.paired, this.height - AXIS);
    this.scrollTo(this.scroll);
    this.image = null;
    this.ask();
  }

  get scrolls(): boolean {
    return this.layout.height > this.height - AXIS;
  }

  scrollTo(y: number): void {
    const most = Math.max(0, this.layout.height - (this.height - AXIS));
    this.scroll = Math.min(Math.max(0, y), most);
    this.ask();
  }

  /** Draw at the next frame. */
  ask(): void {
    if (this.asked || !this.canvas.isConnected) return;
    this.asked = true;
    requestAnimationFrame(() => {
      this.asked = false;
      const moving = this.viewport.advance();
      this.draw();
      if (moving) this.ask();
    });
  }

  x(time: number): number {
    return GUTTER + ((time - this.viewport.begin) / this.viewport.length) * (this.width - GUTTER);
  }

  time(x: number): number {
    return this.viewport.begin + ((x - GUTTER) / (this.width - GUTTER)) * this.viewport.length;
  }

  /** Where a lane's top is on the canvas. */
  top(row: Lane | Head): number {
    return AXIS + row.y - this.scroll;
  }

  laneAt(y: number): Lane | null {
    const at = y - AXIS + this.scroll;
    return this.layout.lanes.find((lane) => lane.y <= at && at < lane.y + lane.height + 1) ?? null;
  }

  laneOf(timeline: number, track: number, span: number): Lane | null {
    return (
      this.layout.lanes.find(
        (lane) => lane.timeline === timeline && lane.track === track && lane.spans.includes(span),
      ) ?? null
    );
  }

  visible(row: Lane | Head): boolean {
    const top = this.top(row);
    return top + row.height > AXIS && top < this.height;
  }

  draw(): void {
    const context = this.canvas.getContext("2d");
    if (!context || this.width <= GUTTER) return;
    const began = performance.now();
    const ratio = devicePixelRatio || 1;
    const marks = ticks(
      this.viewport.begin,
      this.viewport.end,
      (this.width - GUTTER) / 110,
      this.report.timelines[0].unit,
    );
    context.setTransform(1, 0, 0, 1, 0, 0);
    this.drawLanes(context, ratio, marks);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.font = FONT;
    context.textBaseline = "middle";
    context.save();
    context.beginPath();
    context.rect(GUTTER, AXIS, this.width - GUTTER, this.height - AXIS);
    context.clip();
    if (this.mode === "memory") drawMemory(this, context);
    else drawNames(this, context);
    drawOverlay(this, context);
    context.restore();
    this.drawGutter(context);
    this.drawAxis(context, marks);
    this.frames.push(performance.now() - began);
    if (this.frames.length > MOST_FRAMES) this.frames.shift();
  }

  private drawLanes(context: CanvasRenderingContext2D, ratio: number, marks: Tick[]): void {
    const width = Math.floor((this.width - GUTTER) * ratio);
    const height = Math.floor((this.height - AXIS) * ratio);
    if (!this.image || this.image.width !== width || this.image.height !== height) {
      this.image = context.createImageData(width, Math.max(height, 1));
      this.raster = new Raster(width);
    }
    const pixels = new Uint32Array(this.image.data.buffer);
    pixels.fill(pixel(this.surface.page));
    const grounds = [this.surface.lane, this.surface.laneOdd].map((color) =>
      ground(width, pixel(color), pixel(this.surface.grid), marks, (time) => (this.x(time) - GUTTER) * ratio),
    );
    const line = new Uint32Array(width);
    const { begin, end, length } = this.viewport;
    const window = { begin, end, scale: width / length };
    const path = this.store.state.path;
    for (const lane of this.layout.lanes) {
      if (!this.visible(lane)) continue;
      line.set(grounds[lane.track % 2]);
      if (lane.kind !== "memory") {
        const track = this.report.timelines[lane.timeline].tracks[lane.track];
        const colors = this.palette.colors(track.labels);
        const flags = path ? this.onPath(lane.timeline, lane.track) : null;
        this.raster.draw(line, lane, track, window, colors, flags, (style) =>
          this.palette.steppedBack(style),
        );
      }
      const top = Math.round((this.top(lane) - AXIS) * ratio);
      const rows = Math.round(lane.height * ratio);
      for (let y = Math.max(0, top); y < Math.min(height, top + rows); y++) pixels.set(line, y * width);
    }
    context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    context.putImageData(this.image, Math.round(GUTTER * ratio), Math.round(AXIS * ratio));
  }

  /** Which spans of a track are on its timeline's critical path. */
  onPath(timeline: number, track: number): Uint8Array | null {
    const found = this.report.timelines[timeline];
    if (!found.path) return null;
    let flags = this.pathFlags.get(timeline);
    if (!flags) {
      flags = found.tracks.map((each) => new Uint8Array(each.num));
      for (const part of found.path.parts) if (part.runs) flags[part.place.track][part.place.span] = 1;
      this.pathFlags.set(timeline, flags);
    }
    return flags[track];
  }

  private drawGutter(context: CanvasRenderingContext2D): void {
    const { surface } = this;
    context.fillStyle = surface.page;
    context.fillRect(0, 0, GUTTER, this.height);
    context.save();
    context.beginPath();
    context.rect(0, AXIS, this.width, this.height - AXIS);
    context.clip();
    context.fillStyle = surface.line;
    context.fillRect(GUTTER - 1, AXIS, 1, this.height);
    for (const head of this.layout.heads) if (this.visible(head)) this.drawHead(context, head);
    if (this.mode === "timeline")
      for (const lane of this.layout.lanes) if (this.visible(lane)) this.drawStream(context, lane);
    context.restore();
  }

  private drawHead(context: CanvasRenderingContext2D, head: Head): void {
    const { surface } = this;
    const timeline = this.report.timelines[head.timeline];
    const top = this.top(head);
    context.textAlign = "left";
    if (head.track === null) {
      context.fillStyle = surface.page;
      context.fillRect(0, top, this.width, head.height);
      context.font = BOLD;
      context.fillStyle = surface.text;
      context.fillText(timeline.name, 12, top + head.height / 2);
      const at = 12 + context.measureText(timeline.name).width + 10;
      context.font = FONT;
      context.fillStyle = surface.muted;
      context.fillText(`${timeline.source}, step of ${duration(timeline.end)}`, at, top + head.height / 2);
      return;
    }
    const track = timeline.tracks[head.track];
    const paired = this.store.state.paired && this.report.timelines.length > 1;
    context.font = BOLD;
    context.fillStyle = surface.text;
    const name = track.numRanks > 1 || this.mode === "memory" ? track.name : track.ranks;
    const middle = Math.min(head.height / 2, 11);
    context.fillText(cut(context, name, 76), 12, top + middle);
    context.font = FONT;
    context.fillStyle = surface.muted;
    const more = paired ? timeline.source : track.numRanks > 1 ? track.ranks : "";
    if (more && head.height >= 28) context.fillText(cut(context, more, 76), 12, top + middle + 14);
  }

  private drawStream(context: CanvasRenderingContext2D, lane: Lane): void {
    if (lane.whole < 8) return;
    const size = lane.whole < 11 ? 9 : 10;
    context.font = `${size}px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif`;
    context.textAlign = "right";
    context.fillStyle = lane.kind === "computation" ? this.surface.muted : this.surface.faint;
    context.fillText(cut(context, lane.name, 78), GUTTER - 10, this.top(lane) + lane.whole / 2 + 0.5);
  }

  private drawAxis(context: CanvasRenderingContext2D, marks: Tick[]): void {
    const { surface } = this;
    context.fillStyle = surface.page;
    context.fillRect(0, 0, this.width, AXIS);
    context.fillStyle = surface.line;
    context.fillRect(0, AXIS - 1, this.width, 1);
    context.font = FONT;
    context.textAlign = "center";
    for (const { time, text } of marks) {
      const x = this.x(time);
      if (x < GUTTER + 16 || x > this.width - 20) continue;
      context.fillStyle = surface.line;
      context.fillRect(x, AXIS - 5, 1, 4);
      context.fillStyle = surface.muted;
      context.fillText(text, x, AXIS / 2);
    }
    context.textAlign = "left";
    context.fillStyle = surface.faint;
    context.fillText(`window ${duration(this.viewport.length)}`, 12, AXIS / 2);
    this.drawCursorTime(context);
  }

  private drawCursorTime(context: CanvasRenderingContext2D): void {
    const { cursor } = this.store.state;
    if (cursor === null) return;
    const text = this.report.timelines[0].unit === "s" ? `${cursor.toFixed(3)} ms` : cursor.toFixed(2);
    const wide = context.measureText(text).width + 12;
    const x = Math.min(Math.max(this.x(cursor), GUTTER + wide / 2), this.width - wide / 2);
    if (this.x(cursor) < GUTTER) return;
    context.fillStyle = this.surface.text;
    context.beginPath();
    context.roundRect(x - wide / 2, 3, wide, AXIS - 8, 4);
    context.fill();
    context.fillStyle = this.surface.page;
    context.textAlign = "center";
    context.fillText(text, x, AXIS / 2);
    context.textAlign = "left";
  }
}

/** The background of a lane, with the lines of the axis. */
function ground(
  width: number,
  color: number,
  grid: number,
  marks: Tick[],
  place: (time: number) => number,
): Uint32Array {
  const line = new Uint32Array(width).fill(color);
  for (const { time } of marks) {
    const x = Math.floor(place(time));
    if (x >= 0 && x < width) line[x] = mix(color, grid, 0.9);
  }
  return line;
}

export function cut(context: CanvasRenderingContext2D, text: string, width: number): string {
  if (context.measureText(text).width <= width) return text;
  let length = text.length;
  while (length > 1 && context.measureText(`${text.slice(0, length)}…`).width > width) length--;
  return `${text.slice(0, length)}…`;
}
