// Curves of memory: for each track the bytes of every category over time, stacked.
import type { Memory } from "../data/track";
import type { Lane } from "../timeline/lanes";
import type { Picture } from "../timeline/picture";
import { GUTTER } from "../timeline/picture";
import { bytes } from "../ui/format";

export function drawMemory(picture: Picture, context: CanvasRenderingContext2D): void {
  const most = picture.report.mostAlive;
  for (const lane of picture.layout.lanes)
    if (picture.visible(lane)) drawLane(picture, context, lane, most);
}

function drawLane(picture: Picture, context: CanvasRenderingContext2D, lane: Lane, most: number): void {
  const { report, surface } = picture;
  const { tracks, end } = report.timelines[lane.timeline];
  const { memory } = tracks[lane.track];
  if (!memory || !most) return;
  const bottom = picture.top(lane) + lane.height;
  const scale = (lane.height - 10) / most;
  const points = pointsOf(picture, memory, end);
  const base = new Float64Array(points.length);
  for (const [name, color] of Object.entries(report.categories)) {
    const held = memory.held.get(name);
    if (!held) continue;
    context.fillStyle = color;
    context.beginPath();
    points.forEach(({ from, to, moment }, i) => {
      const y = bottom - (base[i] + held[moment]) * scale;
      context.lineTo(from, y);
      context.lineTo(to, y);
    });
    for (let i = points.length - 1; i >= 0; i--) {
      context.lineTo(points[i].to, bottom - base[i] * scale);
      context.lineTo(points[i].from, bottom - base[i] * scale);
    }
    context.fill();
    points.forEach(({ moment }, i) => (base[i] += held[moment]));
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
  const text = `at most ${bytes(memory.peak)}`;
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

/** A stretch of the canvas, and the moment whose bytes it shows. */
interface Point {
  from: number;
  to: number;
  moment: number;
}

/** What is seen of a curve that goes on until `end`; of several moments in one pixel the highest. */
function pointsOf(picture: Picture, memory: Memory, end: number): Point[] {
  const { times, total } = memory;
  const { viewport } = picture;
  const last = memory.moment(viewport.end);
  const points: Point[] = [];
  for (let moment = memory.moment(viewport.begin); moment <= last; moment++) {
    const from = Math.max(picture.x(times[moment]), GUTTER);
    const to = Math.min(picture.x(moment + 1 < times.length ? times[moment + 1] : end), picture.width);
    const before = points[points.length - 1];
    if (before && before.to - before.from < 1) {
      before.to = to;
      if (total[moment] > total[before.moment]) before.moment = moment;
    } else if (to > from) points.push({ from, to, moment });
  }
  return points;
}
