// Mouse and keys of a picture: zoom, pan, hover, choose. As in Perfetto: W and S, A and D, F.
import type { Place } from "../data/meetings";
import { gapAt } from "../explain/gaps";
import type { Store } from "../state";
import { firstAfter } from "./lanes";
import type { Lane } from "./lanes";
import type { Picture } from "./picture";
import { AXIS, GUTTER } from "./picture";

const NEAR = 3; // pixels around a span that still hit it
const STILL = 4; // pixels that a click may move

export interface Hit {
  lane: Lane;
  time: number;
  span: number | null;
}

export function hitAt(picture: Picture, x: number, y: number): Hit | null {
  const lane = y >= AXIS && x >= GUTTER ? picture.laneAt(y) : null;
  if (!lane) return null;
  const time = picture.time(x);
  if (lane.kind === "memory") return { lane, time, span: null };
  const track = picture.report.timelines[lane.timeline].tracks[lane.track];
  const near = picture.time(x + NEAR) - time;
  let best: number | null = null;
  let distance = near;
  for (let i = firstAfter(lane, track, time - near); i < lane.spans.length; i++) {
    const span = lane.spans[i];
    if (track.start[span] > time + near) break;
    const off = Math.max(track.start[span] - time, time - track.end[span], 0);
    if (off < distance || (off === 0 && best === null)) [best, distance] = [span, off];
    if (off === 0) break;
  }
  return { lane, time, span: best };
}

export class Input {
  private drag: { x: number; y: number; moved: boolean; scroll: number } | null = null;
  private readonly pressed = new Set<string>();
  private running = false;

  constructor(
    private readonly picture: Picture,
    private readonly store: Store,
    private readonly onHover: (hit: Hit | null, x: number, y: number) => void,
  ) {
    const { canvas } = picture;
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("pointerdown", (event) => this.down(event));
    canvas.addEventListener("pointermove", (event) => this.move(event));
    canvas.addEventListener("pointerup", (event) => this.up(event));
    canvas.addEventListener("pointerleave", () => this.leave());
    canvas.addEventListener("dblclick", (event) => this.zoomTo(event));
  }

  private wheel(event: WheelEvent): void {
    event.preventDefault();
    const { picture } = this;
    const { viewport } = picture;
    const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
    const unit = event.deltaMode === 1 ? 24 : 1;
    if (!event.ctrlKey && !event.metaKey && (event.shiftKey || sideways)) {
      const by = (sideways ? event.deltaX : event.deltaY) * unit;
      viewport.pan((by / (picture.width - GUTTER)) * viewport.length);
    } else if (event.ctrlKey || event.metaKey || !picture.scrolls) {
      const factor = Math.exp(Math.min(Math.max(event.deltaY * unit, -120), 120) * 0.0025);
      viewport.zoom(picture.time(Math.max(event.offsetX, GUTTER)), factor);
    } else {
      picture.scrollTo(picture.scroll + event.deltaY * unit);
    }
    picture.ask();
  }

  private down(event: PointerEvent): void {
    this.picture.canvas.setPointerCapture(event.pointerId);
    this.picture.canvas.focus({ preventScroll: true });
    const { offsetX: x, offsetY: y } = event;
    this.drag = { x, y, moved: false, scroll: this.picture.scroll };
  }

  private move(event: PointerEvent): void {
    const { picture, drag } = this;
    const { offsetX: x, offsetY: y } = event;
    if (drag) {
      if (!drag.moved && Math.hypot(x - drag.x, y - drag.y) < STILL) return;
      if (!drag.moved) picture.canvas.classList.add("dragging");
      drag.moved = true;
      const { viewport } = picture;
      viewport.pan((-(event.movementX || 0) / (picture.width - GUTTER)) * viewport.length);
      picture.scrollTo(drag.scroll - (y - drag.y));
      this.onHover(null, x, y);
      picture.ask();
      return;
    }
    const hit = hitAt(picture, x, y);
    const cursor = x >= GUTTER ? picture.time(x) : null;
    this.store.set({ cursor });
    if (hit?.lane.kind === "memory")
      this.store.set({ memory: keep(this.store.state.memory, hit.lane) });
    this.onHover(hit, x, y);
  }

  private up(event: PointerEvent): void {
    const { drag } = this;
    this.drag = null;
    this.picture.canvas.classList.remove("dragging");
    if (!drag || drag.moved) return;
    this.choose(event.offsetX, event.offsetY);
  }

  private leave(): void {
    this.store.set({ cursor: null });
    this.onHover(null, 0, 0);
  }

  private choose(x: number, y: number): void {
    const { picture, store } = this;
    const hit = hitAt(picture, x, y);
    if (!hit) return store.set({ selection: null, pinned: false, microbatch: null });
    const { timeline, track } = hit.lane;
    if (hit.lane.kind === "memory")
      return store.set({ selection: { kind: "memory", timeline, track, time: hit.time } });
    if (hit.span !== null) return choosePlace(picture, store, timeline, { track, span: hit.span });
    const gap = gapAt(picture.report.timelines[timeline], track, hit.time);
    store.set({
      selection: gap ? { kind: "gap", timeline, gap } : null,
      pinned: false,
      microbatch: null,
    });
  }

  private zoomTo(event: MouseEvent): void {
    const hit = hitAt(this.picture, event.offsetX, event.offsetY);
    if (hit && hit.span !== null) focus(this.picture, this.store);
  }

  /** True if the key moves the picture, which it does until it is released. */
  press(name: string): boolean {
    const key = name.toLowerCase();
    if (!["w", "s", "a", "d"].includes(key)) return false;
    this.pressed.add(key);
    if (!this.running) {
      this.running = true;
      this.glide(performance.now());
    }
    return true;
  }

  /** A key, or all of them. */
  release(name?: string): void {
    if (name === undefined) this.pressed.clear();
    else this.pressed.delete(name.toLowerCase());
  }

  private glide(before: number): void {
    if (!this.pressed.size) {
      this.running = false;
      return;
    }
    requestAnimationFrame((now) => {
      const seconds = Math.min(0.05, Math.max(0, (now - before) / 1e3));
      const { viewport } = this.picture;
      const center = this.store.state.cursor ?? (viewport.begin + viewport.end) / 2;
      if (this.pressed.has("w")) viewport.zoom(center, Math.exp(-2.2 * seconds));
      if (this.pressed.has("s")) viewport.zoom(center, Math.exp(2.2 * seconds));
      if (this.pressed.has("a")) viewport.pan(-0.9 * seconds * viewport.length);
      if (this.pressed.has("d")) viewport.pan(0.9 * seconds * viewport.length);
      this.picture.ask();
      this.glide(now);
    });
  }
}

function keep(
  known: { timeline: number; track: number } | null,
  lane: Lane,
): { timeline: number; track: number } {
  if (known && known.timeline === lane.timeline && known.track === lane.track) return known;
  return { timeline: lane.timeline, track: lane.track };
}

/** Select a span; its microbatch stands out on all ranks. */
export function choosePlace(picture: Picture, store: Store, timeline: number, place: Place): void {
  const track = picture.report.timelines[timeline].tracks[place.track];
  const microbatch = track.labels.microbatch[track.label(place.span)];
  const stands = microbatch >= 0 && !store.state.path;
  store.set({
    selection: { kind: "span", timeline, place },
    microbatch: stands ? microbatch : null,
    pinned: stands,
    directive: null,
  });
}

/** Bring what is selected into the middle, in a window some times as long. */
export function focus(picture: Picture, store: Store): void {
  const { selection } = store.state;
  const { viewport } = picture;
  if (!selection) {
    viewport.glide(viewport.whole.begin, viewport.whole.end);
    return picture.ask();
  }
  let [begin, end] = [0, 0];
  let y: Lane | null = null;
  if (selection.kind === "memory") return;
  if (selection.kind === "gap") [begin, end] = [selection.gap.begin, selection.gap.end];
  else {
    const { track: number, span } = selection.place;
    const track = picture.report.timelines[selection.timeline].tracks[number];
    [begin, end] = [track.start[span], track.end[span]];
    y = picture.laneOf(selection.timeline, number, span);
  }
  const room = Math.max((end - begin) * 1.5, 1e-4);
  viewport.glide(begin - room, end + room);
  if (y) reveal(picture, y);
  picture.ask();
}

/** Scroll as far as it takes to see a lane. */
export function reveal(picture: Picture, lane: Lane): void {
  const top = picture.top(lane);
  if (top < AXIS || top + lane.height > picture.height) picture.scrollTo(lane.y - (picture.height - AXIS) / 2);
}

/** Move the window, not its length, as far as it takes to see a span, and select it. */
export function visit(picture: Picture, store: Store, timeline: number, place: Place): void {
  choosePlace(picture, store, timeline, place);
  const track = picture.report.timelines[timeline].tracks[place.track];
  const { viewport } = picture;
  const [begin, end] = [track.start[place.span], track.end[place.span]];
  if (begin < viewport.begin || end > viewport.end) {
    const half = Math.max(viewport.length, (end - begin) * 1.5) / 2;
    viewport.glide((begin + end) / 2 - half, (begin + end) / 2 + half);
  }
  const lane = picture.laneOf(timeline, place.track, place.span);
  if (lane) reveal(picture, lane);
  picture.ask();
}
