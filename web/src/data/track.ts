// The spans of a rank, or of all ranks of a class, in one step. Times are milliseconds from its begin.
import type { Block, Numbers } from "./block";
import type { Labels } from "./labels";
import type { MemoryRefs, TrackRows } from "./schema";

export class Memory {
  readonly times: Float64Array;
  readonly held: Map<string, Numbers>;
  readonly total: Float64Array;
  readonly peak: number;
  readonly peakTime: number;
  readonly slot: Numbers;
  readonly begin: Numbers;
  readonly end: Numbers;
  readonly own = new Map<number, number>();

  constructor(block: Block, refs: MemoryRefs, tick: number) {
    this.times = Float64Array.from(block.numbers(refs.times), (time) => time * tick);
    this.held = new Map(
      Object.entries(refs.held).map(([name, ref]) => [name, block.numbers(ref)]),
    );
    this.total = new Float64Array(this.times.length);
    for (const column of this.held.values())
      for (let i = 0; i < column.length; i++) this.total[i] += column[i];
    this.peak = refs.peak;
    this.peakTime = refs.peak_time * tick;
    this.slot = block.numbers(refs.slot);
    this.begin = block.numbers(refs.begin);
    this.end = block.numbers(refs.end);
    const own = block.numbers(refs.own);
    block.numbers(refs.task).forEach((task: number, i: number) => this.own.set(task, own[i]));
  }

  /** The number of the last moment up to a time. */
  moment(time: number): number {
    let low = 0;
    let high = this.times.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.times[middle] <= time) low = middle + 1;
      else high = middle;
    }
    return Math.max(0, low - 1);
  }
}

export class Track {
  readonly name: string;
  readonly ranks: string;
  readonly first: number;
  readonly numRanks: number;
  readonly part: number;
  readonly num: number;
  readonly which: Numbers;
  readonly start: Float64Array;
  readonly end: Float64Array;
  readonly issued: Float64Array;
  readonly waited: Float64Array | null;
  readonly meeting: Numbers;
  /** The span that each waited for last, or -1; none of it without a plan. */
  readonly cause: Int32Array | null;
  readonly why: Numbers | null;
  readonly memory: Memory | null;

  constructor(
    block: Block,
    rows: TrackRows,
    readonly labels: Labels,
    tick: number,
  ) {
    this.name = rows.name;
    this.ranks = rows.ranks;
    this.first = rows.first;
    this.numRanks = rows.num_ranks;
    this.part = rows.part;
    const { spans } = rows;
    this.num = spans.num;
    this.which = spans.which ? block.numbers(spans.which) : Uint32Array.from({ length: this.num }, (_, i) => i);
    this.start = new Float64Array(this.num);
    this.end = new Float64Array(this.num);
    this.issued = new Float64Array(this.num);
    const steps = block.numbers(spans.start);
    const lengths = block.numbers(spans.length);
    const issued = block.numbers(spans.issued);
    for (let i = 0, ticks = 0; i < this.num; i++) {
      ticks += steps[i];
      this.start[i] = ticks * tick;
      this.end[i] = (ticks + lengths[i]) * tick;
      this.issued[i] = (ticks + issued[i]) * tick;
    }
    this.waited = spans.waited
      ? Float64Array.from(block.numbers(spans.waited), (ticks) => ticks * tick)
      : null;
    this.meeting = block.numbers(spans.meeting);
    const back = spans.cause ? block.numbers(spans.cause) : null;
    this.cause = back ? Int32Array.from(back, (steps, i) => (steps ? i - steps : -1)) : null;
    this.why = spans.why ? block.numbers(spans.why) : null;
    this.memory = rows.memory ? new Memory(block, rows.memory, tick) : null;
  }

  label(span: number): number {
    return this.which[span];
  }

  spanName(span: number): string {
    return this.labels.name(this.which[span]);
  }

  talks(span: number): boolean {
    return this.labels.talks[this.which[span]] !== 0;
  }
}
