// What the panel says, as plain text: for tests that hold it to what `piper explain` says.
import type { Context } from "./details/panel";
import { chainOf, gapAt } from "./explain/gaps";
import { chainSentences, gapTitle, plain } from "./explain/words";
import { aliveAt } from "./memory/alive";

export class Answers {
  constructor(private readonly context: Context) {}

  /** Why a track computes nothing at a time; nothing if it does. */
  gap(timeline: number, track: number, time: number): string[] {
    const shown = this.context.report.timelines[timeline];
    const gap = gapAt(shown, track, time);
    if (!gap) return [];
    const sentences = chainSentences(shown, chainOf(this.context.causes[timeline], gap));
    return [gapTitle(shown, gap), ...sentences.map((sentence) => `  ${plain(sentence)}`)];
  }

  /** A task of a class, as `piper explain PLAN.json TASK` prints it. */
  task(part: number, task: number): string[] {
    const found = this.context.report.classes[part];
    const lines = this.context.book
      .facts(found, task)
      .flatMap(({ word, lines }) => lines.map((line, i) => `  ${(i ? "" : word).padEnd(8)} ${line}`));
    return [found.name(task), ...lines];
  }

  /** Bytes alive on a track at a time, in all and of its tensors by category. */
  alive(timeline: number, track: number, time: number): { total: number; sums: Record<string, number> } {
    const found = aliveAt(this.context.report, this.context.book, timeline, track, time);
    const sums: Record<string, number> = {};
    for (const { category, nbytes } of found?.tensors ?? []) sums[category] = (sums[category] ?? 0) + nbytes;
    return { total: found?.total ?? 0, sums };
  }
}
