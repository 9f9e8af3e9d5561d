// Rows of the picture: timelines in; a lane per stream of each track, with its spans in time, out.
import type { Report, Timeline } from "../data/report";
import type { Track } from "../data/track";

export type LaneKind = "computation" | "communication" | "memory";

export interface Lane {
  timeline: number;
  track: number;
  kind: LaneKind;
  name: string;
  /** Spans that do not overlap, by their starts. */
  spans: Uint32Array;
  y: number;
  height: number;
  /** Of the first lane of a stream, how high all its lanes are; else 0. */
  whole: number;
}

/** Where a track, or the name of a timeline, stands. */
export interface Head {
  timeline: number;
  track: number | null;
  y: number;
  height: number;
}

export interface Layout {
  lanes: Lane[];
  heads: Head[];
  height: number;
}

export interface Heights {
  title: number;
  computation: number;
  communication: number;
  memory: number;
  between: number;
  /** Whether spans of a stream that overlap share its height. */
  shared: boolean;
}

/** A stream of a track: spans that overlap are in different parts. */
interface Row {
  kind: LaneKind;
  name: string;
  parts: Uint32Array[];
}

export const ROOMY: Heights = {
  title: 26,
  computation: 22,
  communication: 12,
  memory: 64,
  between: 8,
  shared: false,
};
const SHARED: Heights = { ...ROOMY, communication: 13, shared: true };
const DENSE: Heights = { title: 24, computation: 17, communication: 10, memory: 46, between: 7, shared: true };
const LOWEST = 4; // of a lane
const TALLEST = 200; // a curve of memory
const MOST_LANES = 4; // of one stream whose spans overlap

export class Lanes {
  private readonly rows = new Map<Track, Row[]>();

  constructor(private readonly report: Report) {}

  /** Roomy where that fits into a height, else dense; curves of memory share what there is. */
  fitted(mode: "timeline" | "memory", paired: boolean, height: number): Layout {
    const roomy = this.layout(mode, paired, ROOMY);
    if (roomy.height > height) {
      const shared = this.layout(mode, paired, SHARED);
      return shared.height <= height ? shared : this.layout(mode, paired, DENSE);
    }
    if (mode === "timeline" || !roomy.lanes.length) return roomy;
    const more = Math.floor((height - roomy.height) / roomy.lanes.length);
    return this.layout(mode, paired, { ...ROOMY, memory: Math.min(TALLEST, ROOMY.memory + more) });
  }

  private layout(mode: "timeline" | "memory", paired: boolean, heights: Heights): Layout {
    const lanes: Lane[] = [];
    const heads: Head[] = [];
    let y = 0;
    let titled = -1;
    for (const [timeline, track] of this.order(paired)) {
      if (!paired && timeline !== titled && this.report.timelines.length > 1) {
        heads.push({ timeline, track: null, y, height: heights.title });
        y += heights.title;
        titled = timeline;
      }
      const top = y;
      const found = this.report.timelines[timeline].tracks[track];
      const rows =
        mode === "memory"
          ? [{ kind: "memory" as const, name: "memory", parts: [new Uint32Array()] }]
          : this.rowsOf(found);
      for (const { kind, name, parts } of rows) {
        const height = heights.shared ? Math.max(LOWEST, Math.floor(heights[kind] / parts.length)) : heights[kind];
        const whole = height * parts.length + (heights.shared ? 0 : parts.length - 1);
        parts.forEach((spans, part) => {
          lanes.push({ kind, name, spans, timeline, track, y, height, whole: part ? 0 : whole });
          y += height + (heights.shared && part + 1 < parts.length ? 0 : 1);
        });
      }
      heads.push({ timeline, track, y: top, height: y - top });
      y += heights.between;
    }
    return { lanes, heads, height: y };
  }

  private order(paired: boolean): [number, number][] {
    const { timelines } = this.report;
    const all = timelines.flatMap((timeline: Timeline, number) =>
      timeline.tracks.map((_, track): [number, number] => [number, track]),
    );
    if (!paired) return all;
    const first = ([timeline, track]: [number, number]): number =>
      timelines[timeline].tracks[track].first;
    return all.sort((a, b) => first(a) - first(b) || a[0] - b[0]);
  }

  private rowsOf(track: Track): Row[] {
    const known = this.rows.get(track);
    if (known) return known;
    const streams = new Map<string, { kind: LaneKind; name: string; spans: number[] }>();
    for (let span = 0; span < track.num; span++) {
      const kind: LaneKind = track.talks(span) ? "communication" : "computation";
      const name = track.labels.stream(track.label(span));
      const key = `${kind}:${name}`;
      const stream = streams.get(key);
      if (stream) stream.spans.push(span);
      else streams.set(key, { kind, name, spans: [span] });
    }
    const sorted = [...streams.values()].sort(
      (a, b) => Number(a.kind === "communication") - Number(b.kind === "communication"),
    );
    const rows = sorted.map(({ kind, name, spans }) => ({
      kind,
      name,
      parts: apart(track, spans).map((part) => Uint32Array.from(part)),
    }));
    this.rows.set(track, rows);
    return rows;
  }
}

/** Spans of one stream in as few lists as it takes for none to overlap. */
function apart(track: Track, spans: number[]): number[][] {
  const byStart = [...spans].sort((a, b) => track.start[a] - track.start[b] || a - b);
  const lists: number[][] = [];
  const ends: number[] = [];
  for (const span of byStart) {
    let list = ends.findIndex((end) => end <= track.start[span]);
    if (list < 0 && lists.length < MOST_LANES) {
      list = lists.length;
      lists.push([]);
      ends.push(0);
    }
    if (list < 0) list = ends.indexOf(Math.min(...ends));
    lists[list].push(span);
    ends[list] = Math.max(ends[list], track.end[span]);
  }
  return lists;
}

/** The first of a lane's spans that ends after a time. */
export function firstAfter(lane: Lane, track: Track, time: number): number {
  let low = 0;
  let high = lane.spans.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (track.end[lane.spans[middle]] <= time) low = middle + 1;
    else high = middle;
  }
  return low;
}
