// One task of a plan: what it touches, what it waits for and why (src/piper/plan/report/explain.py).
import type { RankClass } from "../data/classes";
import type { DirectiveRow } from "../data/schema";
import { bytes } from "../ui/format";
import { Reasons } from "./reasons";

const SHOWN = 12;

/** Lines under a word: `reads`, `writes`, `after`. */
export interface Fact {
  word: string;
  lines: string[];
}

export class TaskBook {
  private readonly known = new Map<RankClass, Reasons>();

  constructor(
    private readonly classes: RankClass[],
    private readonly directives: DirectiveRow[],
  ) {}

  private reasons(found: RankClass): Reasons {
    const known = this.known.get(found) ?? new Reasons(found);
    this.known.set(found, known);
    return known;
  }

  /** All tasks that write a slot or a part of it, in the order of dispatch. */
  writers(found: RankClass, slot: number): number[] {
    return this.reasons(found).writersOf(slot);
  }

  facts(found: RankClass, task: number): Fact[] {
    const facts: Fact[] = [];
    const add = (word: string, lines: string[]): void => {
      if (lines.length) facts.push({ word, lines });
    };
    const place = `task ${task} of ${found.num}`;
    add("kind", [`${found.kind(task)} on stream ${found.stream(task)}, ${place}`]);
    add("class", [found.about]);
    add("from", [this.origin(found, task)]);
    if (found.group(task)) add("group", [found.group(task)]);
    if (found.key(task)) {
      add("key", [found.key(task)]);
      for (const peer of this.peers(found, found.key(task))) add("meets", [peer]);
    }
    if (found.leaves[task])
      add("leaves", [`${found.leaves[task]} multiprocessors to the communication beside it`]);
    add("reads", this.slots(found, found.reads.row(task)));
    add("writes", this.slots(found, found.writes.row(task)));
    add("frees", this.slots(found, found.frees.row(task)));
    add("after", this.before(found, task));
    add("before", this.after(found, task));
    for (let group = 0; group < found.overlaps.length; group++) {
      const members = found.overlaps.row(group);
      if (members.includes(task)) add("overlap", members.map((member) => found.name(member)));
    }
    add("Values", [this.alive(found, task)]);
    return facts;
  }

  private origin(found: RankClass, task: number): string {
    const directive = this.directives[found.origin[task]];
    if (!directive) return "the traced program; no directive made it";
    const source = directive.source ? `${directive.source}; ` : "";
    return `${directive.code}  (${source}it ${directive.effect})`;
  }

  private peers(found: RankClass, key: string): string[] {
    const lines: string[] = [];
    for (const other of this.classes) {
      if (other === found) continue;
      for (let task = 0; task < other.num; task++)
        if (other.key(task) === key)
          lines.push(`${other.name(task)} at ${other.slice}, task ${task} there`);
    }
    return lines;
  }

  private slots(found: RankClass, slots: number[]): string[] {
    const known = [...new Set(slots)];
    const lines = known
      .slice(0, SHOWN)
      .map((slot) => `${found.slots.name(slot)}  ${found.slots.about(slot)}`);
    const rest = known.slice(SHOWN);
    if (rest.length) {
      const size = rest.reduce((sum, slot) => sum + found.slots.bound[slot], 0);
      lines.push(`and ${rest.length} more, ${bytes(size)}`);
    }
    return lines;
  }

  private before(found: RankClass, task: number): string[] {
    const reasons = this.reasons(found);
    let same = task - 1;
    while (same >= 0 && found.stream(same) !== found.stream(task)) same--;
    const waits = found.waits.row(task);
    const needed = reasons.needed(task).filter((other) => !waits.includes(other));
    const lines = waits.map((other) => line(found, other, reasons.why(other, task)));
    if (same >= 0) {
      const why = needed.includes(same) ? `; ${reasons.why(same, task)}` : "";
      lines.push(line(found, same, `before it on its stream${why}`));
    }
    for (const other of needed)
      if (other !== same)
        lines.push(line(found, other, `${reasons.why(other, task)}; no wait: ${sure(found, other, task)}`));
    return few(lines);
  }

  private after(found: RankClass, task: number): string[] {
    const reasons = this.reasons(found);
    const lines: string[] = [];
    let following = -1;
    for (let later = task + 1; later < found.num; later++) {
      if (following < 0 && found.stream(later) === found.stream(task)) following = later;
      if (found.waits.row(later).includes(task)) lines.push(line(found, later, reasons.why(task, later)));
      else if (reasons.needed(later).includes(task))
        lines.push(line(found, later, `${reasons.why(task, later)}; needs no wait`));
    }
    if (following >= 0) lines.push(line(found, following, "next on its stream"));
    return few(lines);
  }

  /** Bytes of Values before, during and after a task, in the order of dispatch. */
  private alive(found: RankClass, task: number): string {
    let alive = 0;
    let most = 0;
    const seen = new Set<number>();
    let shown = "";
    for (let at = 0; at < found.num; at++) {
      const before = alive;
      for (const slot of found.writes.row(at))
        if (!seen.has(slot) && found.slots.passing[slot]) {
          seen.add(slot);
          alive += found.slots.bound[slot];
        }
      const during = alive;
      most = Math.max(most, during);
      for (const slot of found.frees.row(at)) if (seen.has(slot)) alive -= found.slots.bound[slot];
      if (at === task)
        shown = `${bytes(before)} alive before it, ${bytes(during)} during, ${bytes(alive)} after`;
    }
    return `${shown}; the most on this rank is ${bytes(most)}`;
  }
}

/** Why a task need not wait for an earlier one. */
function sure(found: RankClass, before: number, task: number): string {
  if (found.stream(before) === found.stream(task)) return "same stream";
  if (found.blocks(before)) return "the host dispatches nothing before it has read";
  return "what it waits for had waited for it";
}

function line(found: RankClass, task: number, why: string): string {
  return `${found.name(task)} (${found.stream(task)}): ${why}`;
}

function few(lines: string[]): string[] {
  if (lines.length <= SHOWN) return lines;
  return [...lines.slice(0, SHOWN), `and ${lines.length - SHOWN} more`];
}
