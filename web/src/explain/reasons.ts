// Why one task of a class comes after another (src/piper/plan/report/reasons.py).
import type { RankClass } from "../data/classes";
import { ADDS, OF_A_STEP, PACED, SUMS } from "../data/classes";

const ORDER = "an order asks for it";
const HELD = "it is held back until then, so that little memory is in use at once";
const LAST =
  "what is only reported comes last, so that it takes no room from chunks while it waits";
const SHOWN = 3;

export class Reasons {
  private readonly writers = new Map<number, number[]>();
  private readonly readers = new Map<number, number[]>();

  constructor(readonly found: RankClass) {
    for (let task = 0; task < found.num; task++) {
      for (const slot of found.writes.row(task)) push(this.writers, found.slots.root(slot), task);
      for (const slot of found.reads.row(task)) push(this.readers, found.slots.root(slot), task);
    }
  }

  writersOf(slot: number): number[] {
    return this.writers.get(this.found.slots.root(slot)) ?? [];
  }

  /** Earlier tasks whose results a task reads or adds to. */
  needed(task: number): number[] {
    const { found } = this;
    const adds = found.facts[task] & ADDS;
    const slots = new Set([...found.reads.row(task), ...(adds ? found.writes.row(task) : [])]);
    const last = new Set([...slots].map((slot) => this.lastWriter(slot, task)));
    last.delete(-1);
    return [...last].sort((a, b) => a - b);
  }

  /** What of `before` makes `after` come later. */
  why(before: number, after: number): string {
    const { found } = this;
    const { slots } = found;
    const writes = found.writes.row(after);
    const all = [...new Set(found.reads.row(after))];
    const reads = all.filter((slot) => this.lastWriter(slot, after) === before);
    const words = reads.length ? [`reads its result ${this.names(reads)}`] : [];
    const adds = writes.filter(
      (slot) => this.lastWriter(slot, after) === before && !reads.includes(slot),
    );
    if (adds.length) {
      const verb = found.facts[after] & ADDS ? "adds to" : "writes again";
      words.push(`${verb} its result ${this.names(adds)}`);
    }
    const written = writes.filter((slot) => this.readers.get(slots.root(slot))?.includes(before));
    if (written.length) words.push(`overwrites ${this.names(written)}, which it reads`);
    const freed = found.frees
      .row(after)
      .filter((slot) => this.readers.get(slot)?.includes(before) || this.writers.get(slot)?.includes(before))
      .filter((slot) => !reads.includes(slot));
    if (freed.length) words.push(`frees ${this.names(freed)}, which it uses`);
    const taken = new Set(writes.map((slot) => slots.pool[slot]));
    taken.delete(-1);
    const left = found.frees.row(before).filter((slot) => taken.has(slots.pool[slot]));
    if (left.length) words.push(`takes the buffer of ${this.names(left)}, which it frees`);
    return words.join("; ") || this.unseen(before, after);
  }

  /** Why a task waits for one of whose slots it has none. */
  private unseen(before: number, after: number): string {
    const { found } = this;
    const [earlier, facts] = [found.facts[before], found.facts[after]];
    if (found.talks(before) && earlier & SUMS && !(earlier & OF_A_STEP)) return HELD;
    if (!found.talks(after)) return ORDER;
    if (facts & PACED) return HELD;
    return facts & OF_A_STEP && this.onlyReported(after) ? LAST : ORDER;
  }

  private onlyReported(task: number): boolean {
    const { slots } = this.found;
    return !this.found.writes.row(task).some((slot) => this.readers.has(slots.root(slot)));
  }

  lastWriter(slot: number, task: number): number {
    let last = -1;
    for (const writer of this.writersOf(slot)) if (writer < task) last = Math.max(last, writer);
    return last;
  }

  private names(slots: number[]): string {
    const names = slots.map((slot) => this.found.slots.name(slot));
    const more = names.length > SHOWN ? ` and ${names.length - SHOWN} more` : "";
    return names.slice(0, SHOWN).join(", ") + more;
  }
}

function push(lists: Map<number, number[]>, key: number, value: number): void {
  const known = lists.get(key);
  if (known) known.push(value);
  else lists.set(key, [value]);
}
