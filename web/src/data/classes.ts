// What the tasks of a class of ranks touch and wait for, and its slots.
import type { Block, Numbers, Rows } from "./block";
import type { ClassRefs } from "./schema";

export const BLOCKS = 1;
export const ADDS = 2;
export const SUMS = 4;
export const OF_A_STEP = 8;
export const PACED = 16;

export class Slots {
  readonly base: Numbers;
  readonly pool: Numbers;
  readonly bound: Numbers;
  readonly planned: Numbers;
  readonly passing: Numbers;
  private readonly names: Numbers;
  private readonly abouts: Numbers;
  private readonly uses: Numbers;

  constructor(
    block: Block,
    refs: ClassRefs["slots"],
    private readonly strings: string[],
  ) {
    this.names = block.numbers(refs.name);
    this.abouts = block.numbers(refs.about);
    this.uses = block.numbers(refs.use);
    this.base = block.numbers(refs.base);
    this.pool = block.numbers(refs.pool);
    this.bound = block.numbers(refs.bound);
    this.planned = block.numbers(refs.planned);
    this.passing = block.numbers(refs.passing);
  }

  get length(): number {
    return this.names.length;
  }

  name(slot: number): string {
    return this.strings[this.names[slot]];
  }

  about(slot: number): string {
    return this.strings[this.abouts[slot]];
  }

  use(slot: number): string {
    return this.strings[this.uses[slot]];
  }

  /** The slot whose memory another one shows. */
  root(slot: number): number {
    while (this.base[slot] >= 0) slot = this.base[slot];
    return slot;
  }
}

export class RankClass {
  readonly slice: string;
  readonly about: string;
  readonly num: number;
  readonly origin: Numbers;
  readonly facts: Numbers;
  readonly leaves: Numbers;
  readonly reads: Rows;
  readonly writes: Rows;
  readonly frees: Rows;
  readonly waits: Rows;
  readonly overlaps: Rows;
  readonly slots: Slots;
  private readonly texts: Record<"name" | "kind" | "stream" | "phase" | "group" | "key", Numbers>;

  constructor(
    block: Block,
    refs: ClassRefs,
    private readonly strings: string[],
  ) {
    this.slice = refs.slice;
    this.about = refs.about;
    this.num = refs.num;
    this.origin = block.numbers(refs.origin);
    this.facts = block.numbers(refs.facts);
    this.leaves = block.numbers(refs.leaves);
    this.reads = block.rows(refs.reads);
    this.writes = block.rows(refs.writes);
    this.frees = block.rows(refs.frees);
    this.waits = block.rows(refs.waits);
    this.overlaps = block.rows(refs.overlaps);
    this.slots = new Slots(block, refs.slots, strings);
    this.texts = {
      name: block.numbers(refs.name),
      kind: block.numbers(refs.kind),
      stream: block.numbers(refs.stream),
      phase: block.numbers(refs.phase),
      group: block.numbers(refs.group),
      key: block.numbers(refs.key),
    };
  }

  name(task: number): string {
    return this.strings[this.texts.name[task]];
  }

  kind(task: number): string {
    return this.strings[this.texts.kind[task]];
  }

  stream(task: number): string {
    return this.strings[this.texts.stream[task]];
  }

  phase(task: number): string {
    return this.strings[this.texts.phase[task]];
  }

  group(task: number): string {
    return this.strings[this.texts.group[task]];
  }

  key(task: number): string {
    return this.strings[this.texts.key[task]];
  }

  /** A communication, that is: reads of the host have a group, but no kind of communication. */
  talks(task: number): boolean {
    return this.group(task) !== "" && !(this.facts[task] & BLOCKS);
  }

  blocks(task: number): boolean {
    return (this.facts[task] & BLOCKS) !== 0;
  }
}
