// All that the page shows: timelines, and the plan that they are of.
import type { Block } from "./block";
import { RankClass } from "./classes";
import { Labels } from "./labels";
import { Meetings } from "./meetings";
import type { Place } from "./meetings";
import type { PlanRows, StepShares, StyleRow, TimelineRows, Why } from "./schema";
import { Track } from "./track";

export interface PathPart {
  place: Place;
  begin: number;
  end: number;
  why: Why;
  runs: boolean;
}

export interface CriticalPath {
  parts: PathPart[];
  byKind: [string, number][];
  byDirective: [string, number][];
}

export class Timeline {
  readonly name: string;
  readonly source: TimelineRows["source"];
  readonly unit: string;
  readonly step: number;
  readonly steps: number[];
  readonly hostComputes: boolean;
  readonly clockError: number;
  readonly shares: StepShares | null;
  readonly tracks: Track[];
  readonly directives: string[];
  readonly meetings: Meetings;
  readonly path: CriticalPath | null;
  /** The length of the step. */
  readonly end: number;
  readonly whys: Why[];

  constructor(block: Block, rows: TimelineRows, labels: Labels[]) {
    const tick = rows.unit === "s" ? rows.tick * 1e3 : rows.tick;
    this.whys = block.head.whys;
    this.name = rows.name;
    this.source = rows.source;
    this.unit = rows.unit;
    this.step = rows.step;
    this.steps = rows.steps;
    this.hostComputes = rows.host_computes;
    this.clockError = rows.clock_error * 1e3;
    this.shares = rows.shares;
    this.directives = rows.directives;
    this.tracks = rows.tracks.map((track) => new Track(block, track, labels[track.labels], tick));
    this.meetings = new Meetings(this.tracks, rows.host_computes);
    let last = rows.shares ? rows.shares.seconds * 1e3 : 0;
    for (const track of this.tracks)
      for (let i = 0; i < track.num; i++) if (track.end[i] > last) last = track.end[i];
    this.end = last;
    this.path = rows.path ? pathOf(block, rows.path, tick) : null;
  }

  get num(): number {
    return this.tracks.reduce((sum, track) => sum + track.num, 0);
  }

  origin(number: number): string {
    return this.directives[number] ?? "the traced program";
  }
}

function pathOf(block: Block, rows: NonNullable<TimelineRows["path"]>, tick: number): CriticalPath {
  const [track, span] = [block.numbers(rows.track), block.numbers(rows.span)];
  const [begin, end] = [block.numbers(rows.begin), block.numbers(rows.end)];
  const [why, runs] = [block.numbers(rows.why), block.numbers(rows.runs)];
  const parts = Array.from(track, (number: number, i: number) => ({
    place: { track: number, span: span[i] },
    begin: begin[i] * tick,
    end: end[i] * tick,
    why: block.head.whys[why[i]],
    runs: runs[i] !== 0,
  }));
  return {
    parts,
    byKind: Object.entries(rows.by_kind),
    byDirective: Object.entries(rows.by_directive),
  };
}

export class Report {
  readonly title: string;
  readonly styles: StyleRow[];
  readonly categories: Record<string, string>;
  readonly plan: PlanRows | null;
  readonly classes: RankClass[];
  readonly timelines: Timeline[];

  constructor(readonly block: Block) {
    const { head } = block;
    this.title = head.title;
    this.styles = head.styles;
    this.categories = head.categories;
    this.plan = head.plan;
    const labels = head.labels.map((refs) => new Labels(block, refs, head.strings));
    this.classes = (head.plan?.classes ?? []).map((refs) => new RankClass(block, refs, head.strings));
    this.timelines = head.timelines.map((rows) => new Timeline(block, rows, labels));
  }

  /** Where the longest of the steps ends. */
  get end(): number {
    return Math.max(...this.timelines.map((timeline) => timeline.end));
  }

  /** The most bytes of all curves of memory, where tasks overlap as they do in time. */
  get mostAlive(): number {
    const peaks = this.timelines.flatMap((t) => t.tracks.map((track) => track.memory?.peak ?? 0));
    return Math.max(0, ...peaks);
  }

  /** The directive's line in the user's file. */
  sourceOf(origin: number): string {
    return this.plan?.directives[origin]?.source ?? "";
  }
}
