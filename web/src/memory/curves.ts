// Curves of memory: for each track the bytes of every category over time, stacked.
import type { Lane } from "../timeline/lanes";
import type { Picture } from "../timeline/picture";
import { GUTTER } from "../timeline/picture";
import { bytes } from "../ui/format";

export function drawMemory(picture: Picture, context: CanvasRenderingContext2D): void {
  const most = picture.report.peak;
  for (const lane of picture.layout.lanes)
    if (picture.visible(lane)) drawLane(picture, context, lane, most);
}

function drawLane(picture: Picture, context: CanvasRenderingContext2D, lane: Lane, most: number): void {
  const { report, viewport, surface } = picture;
  const { tracks, end } = report.timelines[lane.timeline];
  const { memory } = tracks[lane.track];
  if (!memory || !most) return;
  const bottom = picture.top(lane) + lane.height;
  const scale = (lane.height - 10) / most;
  const first = memory.moment(viewport.begin);
  const last = Math.min(memory.moment(viewport.end) + 1, memory.times.length);
  const base = new Float64Array(last - first);
  for (const [name, color] of Object.entries(report.categories)) {
    const held = memory.held.get(name);
    if (!held) continue;
    context.fillStyle = color;
    context.beginPath();
    const edges = { times: memory.times, end, first, last };
    forth(picture, context, edges, (i) => bottom - (base[i - first] + held[i]) * scale);
    back(picture, context, edges, (i) => bottom - base[i - first] * scale);
    context.fill();
    for (let i = first; i < last; i++) base[i - first] += held[i];
  }
  const peak = bottom - memory.peak * scale;
  context.strokeStyle = surface.muted;
  context.lineWidth = 1;
  context.setLineDash([4, 3]);
  context.beginPath();
  context.moveTo(GUTTER, peak);
  context.lineTo(picture.width, peak);
  context.stroke();
  context.setLineDash([]);
  const x = picture.x(memory.peakTime);
  context.fillStyle = surface.path;
  context.beginPath();
  context.arc(x, peak, 3, 0, 7);
  context.fill();
  const text = `peak ${bytes(memory.peak)}`;
  context.textAlign = "right";
  const wide = context.measureText(text).width;
  context.fillStyle = surface.page;
  context.globalAlpha = 0.8;
  context.fillRect(picture.width - wide - 14, picture.top(lane) + 1, wide + 10, 15);
  context.globalAlpha = 1;
  context.fillStyle = surface.text;
  context.fillText(text, picture.width - 8, picture.top(lane) + 9);
  const chosen = picture.store.state.memory;
  if (chosen && chosen.timeline === lane.timeline && chosen.track === lane.track) {
    context.strokeStyle = surface.accent;
    context.lineWidth = 2;
    context.strokeRect(GUTTER + 1, picture.top(lane), picture.width - GUTTER - 2, lane.height);
  }
}

type Height = (moment: number) => number;

/** Moments `first` up to `last` of a curve that goes on until `end`. */
interface Edges {
  times: Float64Array;
  end: number;
  first: number;
  last: number;
}

/** Where a moment ends on the canvas. */
function right(picture: Picture, { times, end }: Edges, moment: number): number {
  return picture.x(moment + 1 < times.length ? times[moment + 1] : end);
}

/** Along the moments; several in one pixel show the highest of them. */
function forth(picture: Picture, context: CanvasRenderingContext2D, edges: Edges, y: Height): void {
  let x = Math.max(picture.x(edges.times[edges.first]), GUTTER);
  context.moveTo(x, y(edges.first));
  for (let i = edges.first; i < edges.last; i++) {
    let high = y(i);
    while (i + 1 < edges.last && right(picture, edges, i) - x < 1) high = Math.min(high, y(++i));
    context.lineTo(x, high);
    x = right(picture, edges, i);
    context.lineTo(x, high);
  }
}

function back(picture: Picture, context: CanvasRenderingContext2D, edges: Edges, y: Height): void {
  let next = right(picture, edges, edges.last - 1);
  for (let i = edges.last - 1; i >= edges.first; i--) {
    let high = y(i);
    let left = Math.max(picture.x(edges.times[i]), GUTTER);
    while (i - 1 >= edges.first && next - left < 1) {
      high = Math.min(high, y(--i));
      left = Math.max(picture.x(edges.times[i]), GUTTER);
    }
    context.lineTo(next, high);
    context.lineTo(left, high);
    next = left;
  }
}
