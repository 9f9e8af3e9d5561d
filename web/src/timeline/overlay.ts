// What stands out above the spans: the selection, who it meets, the critical path, the cursor.
import type { Place } from "../data/meetings";
import type { Timeline } from "../data/report";
import type { Lane } from "./lanes";
import type { Picture } from "./picture";
import { AXIS, GUTTER } from "./picture";

const MOST_PARTS = 4000;

export function drawOverlay(picture: Picture, context: CanvasRenderingContext2D): void {
  const { state } = picture.store;
  if (picture.mode === "timeline") {
    if (state.path) picture.report.timelines.forEach((timeline, i) => drawPath(picture, context, timeline, i));
    if (state.hovered) outline(picture, context, state.hovered.timeline, state.hovered.place, 1);
    drawSelection(picture, context);
  }
  if (state.cursor !== null) {
    context.fillStyle = picture.surface.text;
    context.globalAlpha = 0.35;
    context.fillRect(Math.round(picture.x(state.cursor)), AXIS, 1, picture.height);
    context.globalAlpha = 1;
  }
}

function drawSelection(picture: Picture, context: CanvasRenderingContext2D): void {
  const { selection } = picture.store.state;
  if (selection?.kind === "span") {
    const { timeline, place } = selection;
    const { meetings, tracks } = picture.report.timelines[timeline];
    const own = middle(picture, timeline, place, "start");
    for (const other of meetings.members(place)) {
      if (other.track === place.track) continue;
      outline(picture, context, timeline, other, 1.5);
      connect(context, own, middle(picture, timeline, other, "start"), picture.surface.accent);
    }
    const cause = tracks[place.track].cause?.[place.span] ?? -1;
    if (cause >= 0) {
      const before = { track: place.track, span: cause };
      connect(context, middle(picture, timeline, before, "end"), own, picture.surface.muted);
    }
    outline(picture, context, timeline, place, 2.5);
  }
  if (selection?.kind === "gap") {
    const { gap, timeline } = selection;
    const lane = picture.layout.lanes.find(
      (lane) => lane.timeline === timeline && lane.track === gap.track && lane.kind === "computation",
    );
    if (!lane) return;
    const [from, to] = [picture.x(gap.begin), picture.x(gap.end)];
    context.fillStyle = picture.surface.accent;
    context.globalAlpha = 0.18;
    context.fillRect(from, picture.top(lane), to - from, lane.height);
    context.globalAlpha = 1;
    context.strokeStyle = picture.surface.accent;
    context.lineWidth = 2;
    context.strokeRect(from, picture.top(lane), Math.max(to - from, 1), lane.height);
  }
}

const homes = new WeakMap<Timeline, { layout: object; lanes: Map<number, Lane>[] }>();

/** The lane of each span, made once for a layout. */
function laneOf(picture: Picture, timeline: number, place: Place): Lane | null {
  const found = picture.report.timelines[timeline];
  let home = homes.get(found);
  if (!home || home.layout !== picture.layout) {
    const lanes = found.tracks.map(() => new Map<number, Lane>());
    for (const lane of picture.layout.lanes)
      if (lane.timeline === timeline) for (const span of lane.spans) lanes[lane.track].set(span, lane);
    home = { layout: picture.layout, lanes };
    homes.set(found, home);
  }
  return home.lanes[place.track].get(place.span) ?? null;
}

type Point = [x: number, y: number] | null;

function middle(picture: Picture, timeline: number, place: Place, edge: "start" | "end"): Point {
  const lane = laneOf(picture, timeline, place);
  if (!lane) return null;
  const track = picture.report.timelines[timeline].tracks[place.track];
  return [picture.x(track[edge][place.span]), picture.top(lane) + lane.height / 2];
}

function outline(
  picture: Picture,
  context: CanvasRenderingContext2D,
  timeline: number,
  place: Place,
  width: number,
): void {
  const lane = laneOf(picture, timeline, place);
  if (!lane) return;
  const track = picture.report.timelines[timeline].tracks[place.track];
  const from = Math.max(picture.x(track.start[place.span]), GUTTER - 4);
  const to = Math.min(picture.x(track.end[place.span]), picture.width + 4);
  context.strokeStyle = picture.surface.text;
  context.lineWidth = width;
  context.strokeRect(from, picture.top(lane), Math.max(to - from - 1, 1.5), lane.height);
}

function connect(context: CanvasRenderingContext2D, from: Point, to: Point, color: string): void {
  if (!from || !to) return;
  const reach = Math.min(60, Math.max(12, Math.abs(to[0] - from[0]) / 2));
  context.strokeStyle = color;
  context.lineWidth = 1.5;
  context.beginPath();
  context.moveTo(from[0], from[1]);
  context.bezierCurveTo(from[0] + reach, from[1], to[0] - reach, to[1], to[0], to[1]);
  context.stroke();
  context.fillStyle = color;
  context.beginPath();
  context.arc(to[0], to[1], 2.5, 0, 7);
  context.fill();
}

function drawPath(
  picture: Picture,
  context: CanvasRenderingContext2D,
  timeline: Timeline,
  number: number,
): void {
  if (!timeline.path) return;
  const { viewport } = picture;
  const seen = timeline.path.parts.filter((part) => part.end > viewport.begin && part.begin < viewport.end);
  context.strokeStyle = picture.surface.path;
  context.lineWidth = 1.5;
  context.beginPath();
  let last: Point = null;
  for (const part of seen.slice(0, MOST_PARTS)) {
    const lane = laneOf(picture, number, part.place);
    if (!lane) continue;
    const y = picture.top(lane) + lane.height / 2;
    const [from, to] = [picture.x(part.begin), picture.x(part.end)];
    if (last) {
      context.moveTo(last[0], last[1]);
      context.lineTo(from, y);
    }
    if (part.runs) context.rect(from, picture.top(lane) + 0.5, Math.max(to - from, 1), lane.height - 1);
    else {
      context.moveTo(from, y);
      context.lineTo(to, y);
    }
    last = [to, y];
  }
  context.stroke();
}
