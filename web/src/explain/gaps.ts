// Why a rank computes nothing at a time, over all ranks that it waits for (src/piper/insight/gaps.py).
import type { Place } from "../data/meetings";
import { samePlace } from "../data/meetings";
import type { Timeline } from "../data/report";
import type { Why } from "../data/schema";
import type { Causes } from "./causes";

const LONGEST = 200;

/** One step of an explanation: a span, from when to when, and why the one before it waited for it. */
export interface Link {
  place: Place;
  begin: number;
  end: number;
  why: Why;
}

/** A time in which a track computes nothing, and the spans before and after. */
export interface Gap {
  track: number;
  begin: number;
  end: number;
  before: Place | null;
  after: Place | null;
}

export function gapsOf(timeline: Timeline, number: number): Gap[] {
  const track = timeline.tracks[number];
  const busy: number[] = [];
  for (let span = 0; span < track.num; span++) if (!track.talks(span)) busy.push(span);
  busy.sort((a, b) => track.start[a] - track.start[b] || track.end[a] - track.end[b] || a - b);
  const found: Gap[] = [];
  let upto = 0;
  let last: Place | null = null;
  for (const span of busy) {
    const after = { track: number, span };
    if (track.start[span] > upto)
      found.push({ track: number, begin: upto, end: track.start[span], before: last, after });
    if (track.end[span] > upto) [upto, last] = [track.end[span], after];
  }
  if (timeline.end > upto)
    found.push({ track: number, begin: upto, end: timeline.end, before: last, after: null });
  return found;
}

export function gapAt(timeline: Timeline, number: number, time: number): Gap | null {
  const gaps = gapsOf(timeline, number);
  return gaps.find((gap) => gap.begin <= time && time < gap.end) ?? null;
}

/** What the end of a gap waited for, up to what was under way when it began. */
export function chainOf(causes: Causes, gap: Gap): Link[] {
  if (gap.after) return chain(causes, gap.after, gap.begin);
  const last = causes.last;
  return [linkOf(causes, last, "end"), ...chain(causes, last, gap.begin)];
}

/** Back from a span's start, as long as what it waited for was not over at `begin`. */
export function chain(causes: Causes, place: Place, begin: number): Link[] {
  const found: Link[] = [];
  const { timeline } = causes;
  const { meetings } = timeline;
  while (found.length <= LONGEST) {
    const cause = causes.cause(place);
    if (!cause.place || cause.at <= begin) return found;
    let ended = cause.place;
    if (cause.why === "host" && !timeline.hostComputes) {
      const read = causes.readBefore(ended);
      if (!read || timeline.tracks[read.track].end[read.span] <= begin)
        return [...found, starting(causes, ended, cause.at)];
      ended = read;
    } else if (cause.why === "host" && timeline.tracks[ended.track].talks(ended.span)) {
      found.push(starting(causes, ended, cause.at));
      place = ended; // the host had only started it
      continue;
    }
    found.push(linkOf(causes, ended, cause.why));
    const late = meetings.lastToCome(ended);
    if (!samePlace(late, ended)) found.push(linkOf(causes, late, "peer"));
    if (timeline.tracks[late.track].start[late.span] <= begin) return found;
    place = late;
  }
  return found;
}

/** A host that is busy with handing out a task, whenever that runs. */
function starting(causes: Causes, place: Place, until: number): Link {
  const start = causes.timeline.tracks[place.track].start[place.span];
  return { place, begin: Math.min(start, until), end: until, why: "host" };
}

export function linkOf(causes: Causes, place: Place, why: Why): Link {
  const { meetings, tracks } = causes.timeline;
  return { place, begin: meetings.began(place), end: tracks[place.track].end[place.span], why };
}
