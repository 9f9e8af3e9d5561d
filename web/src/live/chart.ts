// Chart: curves over steps on a canvas, with their latest numbers, or those under the pointer, above it.
import { niceStep } from "../timeline/axis";
import { h, replace } from "../ui/dom";
import { count } from "../ui/format";
import type { Surface, Themes } from "../ui/theme";
import type { Curve } from "./curve";
import { Scale } from "./scale";

const LEFT = 58;
const RIGHT = 14;
const TOP = 8;
const BOTTOM = 22;
const APART = { x: 50, y: 26 }; // pixels between the lines of an axis, at least
const AROUND = 0.03; // of a curve's points: what is noise is a mean of so many before and after
const FONT = '11px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';

export interface Line {
  name: string;
  curve: string;
  color: "accent" | "evaluation";
  /** Noise steps back behind a mean. */
  noisy: boolean;
}

export interface ChartKind {
  title: string;
  lines: Line[];
  text: (value: number) => string;
  /** Of a line of the axis, where that is shorter. */
  axis?: (value: number) => string;
  fromZero: boolean;
  /** Whether a few numbers far above all others may be cut off. */
  hasPeaks?: boolean;
  /** What round numbers are of: 1, or a MiB. */
  unit?: (most: number) => number;
  /** Whether the steps that were recorded are marked: they take longer. */
  marks?: boolean;
}

/** What all charts have in common: the steps that they show, and the one under the pointer. */
export interface Look {
  first: number;
  last: number;
  cursor: number | null;
  log: boolean;
}

export class Chart {
  readonly canvas = h("canvas");
  private readonly values = h("span", { class: "chart-values" });
  private readonly box = h("div", { class: "chart-box" }, this.canvas);
  readonly element: HTMLElement;
  private width = 0;
  private height = 0;

  constructor(
    readonly kind: ChartKind,
    private readonly themes: Themes,
  ) {
    this.canvas.setAttribute("aria-label", `${kind.title} by step`);
    const head = h("figcaption", {}, h("span", { class: "chart-title" }, kind.title), this.values);
    this.element = h("figure", { class: "chart", "data-chart": kind.title }, head, this.box);
  }

  resize(): void {
    const { width, height } = this.box.getBoundingClientRect();
    const ratio = devicePixelRatio || 1;
    [this.width, this.height] = [Math.floor(width), Math.floor(height)];
    [this.canvas.width, this.canvas.height] = [this.width * ratio, this.height * ratio];
    this.canvas.style.width = `${this.width}px`;
    this.canvas.style.height = `${this.height}px`;
  }

  stepAt(x: number, { first, last }: Look): number {
    const share = (x - LEFT) / (this.width - LEFT - RIGHT);
    return first + Math.min(Math.max(share, 0), 1) * (last - first);
  }

  private x(step: number, { first, last }: Look): number {
    return LEFT + ((step - first) / (last - first || 1)) * (this.width - LEFT - RIGHT);
  }

  draw(curves: Map<string, Curve>, look: Look, recordings: number[]): void {
    this.tell(curves, look, recordings.length > 0);
    const context = this.canvas.getContext("2d");
    if (!context || this.width <= LEFT) return;
    const ratio = devicePixelRatio || 1;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, this.width, this.height);
    const { surface } = this.themes;
    const log = look.log && !this.kind.fromZero;
    const scale = Scale.of(this.seen(curves, look), this.kind.fromZero, log, TOP, this.height - BOTTOM);
    this.drawAxes(context, scale, look, surface);
    context.save();
    context.beginPath();
    context.rect(LEFT, 0, this.width - LEFT - RIGHT + 4, this.height - BOTTOM + 3);
    context.clip();
    for (const line of this.kind.lines) {
      const curve = curves.get(line.curve);
      if (curve?.length) this.drawLine(context, line, curve, scale, look, surface);
    }
    context.restore();
    if (this.kind.marks) this.drawMarks(context, recordings, look, surface);
    if (look.cursor !== null) this.drawCursor(context, curves, scale, look, surface);
  }

  private tell(curves: Map<string, Curve>, { cursor }: Look, recorded: boolean): void {
    const { lines, text } = this.kind;
    const found = lines.flatMap(({ name, curve, color }) => {
      const known = curves.get(curve);
      const value = !known?.length ? null : cursor === null ? known.last : known.values[known.near(cursor)];
      if (value === null) return [];
      const shown = Number.isNaN(value) ? "not finite" : text(value);
      const key = lines.length > 1 ? h("span", { class: `key ${color}` }, name) : null;
      return [h("span", { class: "chart-value" }, key, h("b", {}, shown))];
    });
    const marks = this.kind.marks && recorded ? h("span", { class: "key mark" }, "recorded") : null;
    replace(this.values, ...found, marks);
  }

  /** The numbers that the axis must have room for. */
  private seen(curves: Map<string, Curve>, { first, last }: Look): number[] {
    const found: number[] = [];
    for (const { curve } of this.kind.lines) {
      const known = curves.get(curve);
      known?.values.forEach((value, i) => {
        if (known.steps[i] >= first && known.steps[i] <= last && !Number.isNaN(value)) found.push(value);
      });
    }
    if (!this.kind.hasPeaks || found.length < 20) return found;
    found.sort((a, b) => a - b);
    const most = found[Math.floor(found.length * 0.95)] * 1.6;
    return found.filter((value) => value <= most);
  }

  private drawAxes(context: CanvasRenderingContext2D, scale: Scale, look: Look, surface: Surface): void {
    const { width, height } = this;
    context.font = FONT;
    context.lineWidth = 1;
    context.textBaseline = "middle";
    context.textAlign = "right";
    const apartY = Math.max(APART.y, height / 6);
    const most = Math.max(0, ...scale.lines(apartY, 1));
    for (const value of scale.lines(apartY, this.kind.unit?.(most) ?? 1)) {
      const y = Math.round(scale.y(value)) + 0.5;
      context.fillStyle = surface.grid;
      context.fillRect(LEFT, y - 0.5, width - LEFT - RIGHT, 1);
      context.fillStyle = surface.muted;
      context.fillText((this.kind.axis ?? this.kind.text)(value), LEFT - 8, y);
    }
    context.textAlign = "center";
    const num = Math.max(1, Math.floor((width - LEFT - RIGHT) / APART.x));
    const apart = Math.max(1, niceStep((look.last - look.first) / num));
    for (let step = Math.ceil(look.first / apart) * apart; step <= look.last; step += apart) {
      const x = this.x(step, look);
      context.fillStyle = surface.line;
      context.fillRect(x, height - BOTTOM, 1, 4);
      context.fillStyle = surface.muted;
      context.fillText(count(step), x, height - BOTTOM / 2 + 2);
    }
    context.fillStyle = surface.line;
    context.fillRect(LEFT, height - BOTTOM, width - LEFT - RIGHT, 1);
  }

  private drawLine(
    context: CanvasRenderingContext2D,
    line: Line,
    curve: Curve,
    scale: Scale,
    look: Look,
    surface: Surface,
  ): void {
    const color = surface[line.color];
    const around = line.noisy ? Math.round(curve.length * AROUND) : 0;
    context.strokeStyle = context.fillStyle = color;
    context.lineJoin = "round";
    if (around > 1) {
      context.globalAlpha = 0.35;
      this.trace(context, curve.steps, curve.values, scale, look, 1);
      context.globalAlpha = 1;
      this.trace(context, curve.steps, curve.smooth(around), scale, look, 2);
    } else this.trace(context, curve.steps, curve.values, scale, look, 1.75);
    if (line.color !== "evaluation" && curve.length > 1) return;
    curve.steps.forEach((step, i) => {
      if (!Number.isNaN(curve.values[i])) dot(context, this.x(step, look), scale.y(curve.values[i]), 2.75);
    });
  }

  private trace(
    context: CanvasRenderingContext2D,
    steps: number[],
    values: number[],
    scale: Scale,
    look: Look,
    width: number,
  ): void {
    context.lineWidth = width;
    context.beginPath();
    let down = false;
    for (let i = 0; i < steps.length; i++) {
      const y = scale.y(values[i]);
      if (!Number.isFinite(y)) down = false;
      else {
        if (down) context.lineTo(this.x(steps[i], look), y);
        else context.moveTo(this.x(steps[i], look), y);
        down = true;
      }
    }
    context.stroke();
  }

  private drawMarks(context: CanvasRenderingContext2D, recordings: number[], look: Look, surface: Surface): void {
    context.fillStyle = surface.faint;
    for (const step of recordings) {
      if (step < look.first || step > look.last) continue;
      const [x, y] = [this.x(step, look), this.height - BOTTOM];
      context.beginPath();
      context.moveTo(x - 3.5, y);
      context.lineTo(x + 3.5, y);
      context.lineTo(x, y - 6);
      context.fill();
    }
  }

  private drawCursor(
    context: CanvasRenderingContext2D,
    curves: Map<string, Curve>,
    scale: Scale,
    look: Look,
    surface: Surface,
  ): void {
    const main = curves.get(this.kind.lines[0].curve);
    if (!main?.length) return;
    const step = main.steps[main.near(look.cursor!)];
    const x = this.x(step, look);
    context.fillStyle = surface.faint;
    context.fillRect(x - 0.5, TOP, 1, this.height - BOTTOM - TOP);
    for (const { curve, color } of this.kind.lines) {
      const known = curves.get(curve);
      if (!known?.length) continue;
      const place = known.near(look.cursor!);
      if (Number.isNaN(known.values[place])) continue;
      context.fillStyle = surface[color];
      dot(context, this.x(known.steps[place], look), scale.y(known.values[place]), 3.5);
    }
    const text = `step ${count(step)}`;
    context.font = FONT;
    const wide = context.measureText(text).width + 12;
    const left = Math.min(Math.max(x - wide / 2, LEFT), this.width - wide - 2);
    context.fillStyle = surface.text;
    context.beginPath();
    context.roundRect(left, this.height - BOTTOM + 3, wide, BOTTOM - 5, 4);
    context.fill();
    context.fillStyle = surface.page;
    context.textAlign = "center";
    context.fillText(text, left + wide / 2, this.height - BOTTOM / 2 + 1);
  }
}

function dot(context: CanvasRenderingContext2D, x: number, y: number, radius: number): void {
  context.beginPath();
  context.arc(x, y, radius, 0, 7);
  context.fill();
}
