// Carried: what the user looks at in one step in; the same in another step of the same plan out.
import type { Place } from "./data/meetings";
import type { Report, Timeline } from "./data/report";
import { gapsOf } from "./explain/gaps";
import type { Selection, Store } from "./state";

export interface Window {
  begin: number;
  end: number;
}

/** What is chosen stays chosen, where it is there; the window of the new step. Nobody listens to the store. */
export function carried(from: Report, to: Report, store: Store, seen: Window): Window {
  const { selection, memory, directive } = store.state;
  const found = selection && selectionIn(from, to, selection);
  const known = memory && to.timelines[memory.timeline]?.tracks[memory.track];
  const same = from.plan?.hash === to.plan?.hash;
  store.set({
    selection: found,
    memory: known ? memory : null,
    directive: same ? directive : null,
    hovered: null,
    cursor: null,
  });
  const scale = to.end / (from.end || 1);
  const length = (seen.end - seen.begin) * scale;
  if (selection?.kind === "span" && found?.kind === "span") {
    const [before, now] = [middle(from, selection), middle(to, found)];
    if (before >= seen.begin && before <= seen.end) {
      const share = (before - seen.begin) / (seen.end - seen.begin);
      return { begin: now - share * length, end: now + (1 - share) * length };
    }
  }
  return { begin: seen.begin * scale, end: seen.begin * scale + length };
}

function middle(report: Report, { timeline, place }: Selection & { kind: "span" }): number {
  const track = report.timelines[timeline].tracks[place.track];
  return (track.start[place.span] + track.end[place.span]) / 2;
}

function selectionIn(from: Report, to: Report, selection: Selection): Selection | null {
  const [before, now] = [from.timelines[selection.timeline], to.timelines[selection.timeline]];
  if (!before || !now) return null;
  if (selection.kind === "memory") return { ...selection, time: (selection.time * now.end) / before.end };
  if (selection.kind === "span") {
    const place = placeIn(before, now, selection.place);
    return place && { ...selection, place };
  }
  const { gap } = selection;
  if (!now.tracks[gap.track]) return null;
  const after = gap.after && placeIn(before, now, gap.after);
  const same = gapsOf(now, gap.track).find((other) => other.after?.span === after?.span);
  return same ? { ...selection, gap: same } : null;
}

/** The span of the same task. */
function placeIn(before: Timeline, now: Timeline, { track, span }: Place): Place | null {
  const found = now.tracks[track];
  if (!found) return null;
  const name = before.tracks[track].spanName(span);
  if (span < found.num && found.spanName(span) === name) return { track, span };
  for (let other = 0; other < found.num; other++)
    if (found.spanName(other) === name) return { track, span: other };
  return null;
}
