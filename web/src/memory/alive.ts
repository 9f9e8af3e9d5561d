// What is alive on a track at a time: bytes by category, and its largest tensors with who made them.
import type { Report } from "../data/report";
import type { TaskBook } from "../explain/task";

export interface Alive {
  name: string;
  category: string;
  nbytes: number;
  /** The task that wrote it, or nothing for what was there before the step. */
  task: string;
  origin: number;
}

export interface AliveAt {
  total: number;
  byCategory: [string, number][];
  tensors: Alive[];
}

export function aliveAt(
  report: Report,
  book: TaskBook,
  timeline: number,
  number: number,
  time: number,
): AliveAt | null {
  const track = report.timelines[timeline].tracks[number];
  const { memory } = track;
  const found = report.classes[track.part];
  if (!memory || !found) return null;
  const moment = memory.moment(time);
  const byCategory = [...memory.held]
    .map(([name, held]): [string, number] => [name, held[moment]])
    .filter(([, nbytes]) => nbytes > 0)
    .sort((a, b) => b[1] - a[1]);
  const tensors: Alive[] = [];
  for (let i = 0; i < memory.slot.length; i++) {
    if (memory.begin[i] > moment || memory.end[i] <= moment) continue;
    const slot = memory.slot[i];
    const nbytes = found.slots.planned[slot];
    if (!nbytes) continue;
    const writers = book.writers(found, slot).filter((task) => track.start[task] <= time);
    const writer = writers[writers.length - 1] ?? -1;
    const before = writer < 0;
    tensors.push({
      name: found.slots.name(slot),
      category: found.slots.use(slot),
      nbytes,
      task: before ? "" : found.name(writer),
      origin: before ? -1 : found.origin[writer],
    });
  }
  for (const [task, nbytes] of memory.own)
    if (track.start[task] <= time && time < track.end[task])
      tensors.push({
        name: `inside of ${found.name(task)}`,
        category: "inside",
        nbytes,
        task: found.name(task),
        origin: found.origin[task],
      });
  tensors.sort((a, b) => b.nbytes - a.nbytes);
  const total = byCategory.reduce((sum, [, nbytes]) => sum + nbytes, 0);
  return { total, byCategory, tensors };
}
