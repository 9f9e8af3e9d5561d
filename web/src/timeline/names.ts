// Names on spans that have room for them, and a mark on those that an order overlaps.
import type { Track } from "../data/track";
import { firstAfter } from "./lanes";
import type { Picture } from "./picture";
import { AXIS, GUTTER } from "./picture";

const INK = "#17202c";
const FAINT = "rgba(110, 122, 138, 0.75)";
const LEAST = 22; // pixels
const LOWEST = 13; // of a lane
const MOST = 900; // names in one frame

export function drawNames(picture: Picture, context: CanvasRenderingContext2D): void {
  const { report, viewport, palette } = picture;
  const scale = (picture.width - GUTTER) / viewport.length;
  let left = MOST;
  context.textAlign = "left";
  for (const lane of picture.layout.lanes) {
    if (!picture.visible(lane)) continue;
    const track = report.timelines[lane.timeline].tracks[lane.track];
    const pairs = lane.kind === "computation" ? overlapped(picture, track) : null;
    const top = picture.top(lane);
    const flags = picture.store.state.path ? picture.onPath(lane.timeline, lane.track) : null;
    for (let i = firstAfter(lane, track, viewport.begin); i < lane.spans.length && left > 0; i++) {
      const span = lane.spans[i];
      if (track.start[span] >= viewport.end) break;
      const wide = (track.end[span] - track.start[span]) * scale;
      if (wide < 3) continue;
      const label = track.label(span);
      const from = Math.max(picture.x(track.start[span]), GUTTER);
      const to = Math.min(picture.x(track.end[span]), picture.width);
      const shown = flags ? flags[span] !== 0 : palette.shows(track.labels, label);
      if (pairs?.has(label) && shown) {
        context.fillStyle = picture.surface.pair;
        context.fillRect(from, top + lane.height - 3, to - from - 1, 3);
      }
      if (lane.height < LOWEST || to - from < LEAST || top < AXIS - lane.height) continue;
      const text = fitting(context, track, label, to - from - 8);
      if (!text) continue;
      context.fillStyle = shown ? INK : FAINT;
      context.fillText(text, from + 4, top + lane.height / 2 + 0.5);
      left--;
    }
  }
}

const widths = new Map<string, number>();

function widthOf(context: CanvasRenderingContext2D, text: string): number {
  let width = widths.get(text);
  if (width === undefined) {
    width = context.measureText(text).width;
    widths.set(text, width);
  }
  return width;
}

/** The name, the short one, or none, by the room there is. */
function fitting(context: CanvasRenderingContext2D, track: Track, label: number, room: number): string {
  const name = track.labels.name(label);
  if (widthOf(context, name) <= room) return name;
  const short = track.labels.short(label);
  return widthOf(context, short) <= room ? short : "";
}

const known = new WeakMap<Picture, Map<number, Set<number>>>();

/** Tasks of a track's class that take turns with others. */
function overlapped(picture: Picture, track: Track): Set<number> | null {
  const found = picture.report.classes[track.part];
  if (!found) return null;
  const sets = known.get(picture) ?? new Map<number, Set<number>>();
  known.set(picture, sets);
  let set = sets.get(track.part);
  if (!set) {
    set = new Set();
    for (let group = 0; group < found.overlaps.length; group++)
      for (const task of found.overlaps.row(group)) set.add(task);
    sets.set(track.part, set);
  }
  return set;
}
