// A span: when it ran, who made it, what it waited for, and what the plan says of its task.
import type { Place } from "../data/meetings";
import { samePlace } from "../data/meetings";
import { chain, linkOf } from "../explain/gaps";
import { follows, needs } from "../explain/words";
import { chip, h } from "../ui/dom";
import { bytes, duration } from "../ui/format";
import type { Context } from "./panel";
import { directiveLine, section, sentenceLine, table } from "./sentences";

const SHOWN = 8;

export function spanDetails(context: Context, timeline: number, place: Place): HTMLElement[] {
  const { report } = context;
  const shown = report.timelines[timeline];
  const track = shown.tracks[place.track];
  const label = track.label(place.span);
  const { labels } = track;
  const style = report.styles[labels.style[label]];
  const found = [
    h("h2", {}, chip(style.color), labels.name(label)),
    h("p", { class: "lead" }, `${style.meaning} on ${track.name}, ${shown.source}`),
    table(factRows(context, timeline, place)),
    section("Made by", directiveLine(context, timeline, labels.origin[label])),
  ];
  const causes = context.causes[timeline];
  if (causes.known) found.push(...whySections(context, timeline, place));
  const rank = report.classes[track.part];
  if (rank && causes.known) {
    const facts = context.book.facts(rank, label);
    const rows = facts.flatMap(({ word, lines }) =>
      lines.map((line, number) => h("tr", {}, h("th", {}, number ? "" : word), h("td", {}, line))),
    );
    found.push(
      h(
        "details",
        { class: "plan", open: true },
        h("summary", {}, "In the plan"),
        h("table", { class: "facts explain" }, ...rows),
      ),
    );
  }
  return found;
}

function factRows(context: Context, timeline: number, place: Place): [string, string][] {
  const shown = context.report.timelines[timeline];
  const track = shown.tracks[place.track];
  const { span } = place;
  const label = track.label(span);
  const { labels } = track;
  const { meetings } = shown;
  const began = meetings.began(place);
  const came = meetings.came(place);
  const rows: [string, string][] = [
    ["runs", `${began.toFixed(3)} to ${track.end[span].toFixed(3)} ms`],
    ["takes", duration(track.end[span] - began)],
  ];
  if (began > came) rows.push(["waits", `${duration(began - came)} for its peers, from ${came.toFixed(3)} ms on`]);
  const nbytes = labels.nbytes[label];
  if (nbytes) {
    const rate = nbytes / Math.max(track.end[span] - began, 1e-9) / 1e6;
    rows.push(["bytes", `${bytes(nbytes)}${rate < 1e6 ? `, ${rate.toPrecision(3)} GB/s` : ""}`]);
  }
  rows.push(["stream", labels.stream(label)]);
  if (labels.microbatch[label] >= 0) rows.push(["microbatch", String(labels.microbatch[label])]);
  if (track.waited && track.waited[span] > 0) rows.push(["host held", duration(track.waited[span])]);
  return rows;
}

function whySections(context: Context, timeline: number, place: Place): HTMLElement[] {
  const causes = context.causes[timeline];
  const shown = context.report.timelines[timeline];
  const { meetings } = shown;
  const links = chain(causes, place, 0);
  const late = meetings.lastToCome(place);
  if (!samePlace(late, place)) links.unshift(linkOf(causes, late, "peer"));
  const lines = links.slice(0, SHOWN).map((link) => sentenceLine(context, timeline, needs(shown, link)));
  if (links.length > SHOWN) lines.push(h("li", { class: "muted" }, `and so on, ${links.length - SHOWN} more`));
  const after = causes
    .followers(place)
    .map(({ place: other, why }) => follows(shown, linkOf(causes, other, why)));
  const first = links.length ? null : h("p", { class: "muted" }, "Nothing: it begins with the step.");
  return [
    section("It waited for", first, h("ol", { class: "chain why" }, ...lines)),
    section(
      "Then",
      after.length ? null : h("p", { class: "muted" }, "Nothing waited for it last."),
      h(
        "ul",
        { class: "chain" },
        ...after.slice(0, SHOWN).map((sentence) => sentenceLine(context, timeline, sentence)),
      ),
    ),
  ];
}
