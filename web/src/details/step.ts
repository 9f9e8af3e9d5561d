// Where the step goes: shares of its time by rank, and the critical path by kind and by directive.
import type { Timeline } from "../data/report";
import { gapsOf } from "../explain/gaps";
import { gapTitle } from "../explain/words";
import { h } from "../ui/dom";
import { duration, percent, plural } from "../ui/format";
import type { Context } from "./panel";
import { section } from "./sentences";

const MOST_TRACKS = 8;
const MOST_ROWS = 7;
const MOST_GAPS = 4;

export function stepDetails(context: Context): HTMLElement[] {
  const { report } = context;
  const found: HTMLElement[] = [h("h2", {}, "Where the step goes")];
  report.timelines.forEach((timeline, number) => {
    if (report.timelines.length > 1)
      found.push(h("p", { class: "lead strong" }, `${timeline.source}: ${timeline.name}`));
    found.push(section("Computation and exposed communication", ...busyBars(timeline)));
    if (timeline.path) {
      const total = timeline.path.byKind.reduce((sum, [, seconds]) => sum + seconds, 0);
      found.push(
        section("Critical path by kind", ...bars(timeline.path.byKind, total)),
        section("Critical path by directive", ...bars(timeline.path.byDirective, total)),
      );
    }
    found.push(section("Largest gaps", ...gapLines(context, timeline, number)));
  });
  found.push(
    h("p", { class: "hint" }, "Click a span or a gap to see why it is there. ", h("kbd", {}, "?"), " has the keys."),
  );
  return found;
}

function busyBars(timeline: Timeline): HTMLElement[] {
  const { shares } = timeline;
  if (!shares) return [];
  const rows = timeline.tracks.slice(0, MOST_TRACKS).map((track, number) => {
    const { computing, exposed } = shares.tracks[number];
    return bar(track.name, computing, percent(computing), "", exposed);
  });
  const more = timeline.tracks.length - MOST_TRACKS;
  if (more > 0) rows.push(h("p", { class: "muted" }, `and ${plural(more, "more row")}`));
  return rows;
}

function bars(rows: [string, number][], total: number): HTMLElement[] {
  return rows
    .slice(0, MOST_ROWS)
    .map(([name, seconds]) => bar(name, seconds / total, duration(seconds * 1e3)));
}

/** A name, a text and a bar; what is `beside` goes on in another colour. */
export function bar(name: string, share: number, text: string, color = "", beside = 0): HTMLElement {
  const style = `width:${Math.max(0.5, Math.min(1, share) * 100)}%${color ? `;background:${color}` : ""}`;
  return h(
    "div",
    { class: "bar", title: beside ? `${name}: ${text}, and ${percent(beside)} exposed communication` : name },
    h("span", { class: "bar-name" }, name),
    h("span", { class: "bar-value" }, text),
    h(
      "span",
      { class: "bar-track" },
      h("span", { class: "bar-fill", style }),
      beside ? h("span", { class: "bar-fill beside", style: `width:${beside * 100}%` }) : null,
    ),
  );
}

function gapLines(context: Context, timeline: Timeline, number: number): HTMLElement[] {
  const gaps = timeline.tracks
    .flatMap((_, track) => gapsOf(timeline, track))
    .sort((a, b) => b.end - b.begin - (a.end - a.begin))
    .slice(0, MOST_GAPS);
  return gaps.map((gap) =>
    h(
      "button",
      {
        class: "gap-line",
        title: gapTitle(timeline, gap),
        onclick: () => context.store.set({ selection: { kind: "gap", timeline: number, gap } }),
      },
      h("span", {}, duration(gap.end - gap.begin)),
      h("span", { class: "muted" }, `${timeline.tracks[gap.track].name}, from ${gap.begin.toFixed(2)} ms`),
    ),
  );
}
