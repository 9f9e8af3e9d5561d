// A gap: why a rank computes nothing, link by link.
import type { Gap } from "../explain/gaps";
import { chainOf } from "../explain/gaps";
import { chainSentences, gapTitle } from "../explain/words";
import { h } from "../ui/dom";
import { duration, percent } from "../ui/format";
import type { Context } from "./panel";
import { section, sentenceLine, table } from "./sentences";

const SHOWN = 12;

export function gapDetails(context: Context, timeline: number, gap: Gap): HTMLElement[] {
  const shown = context.report.timelines[timeline];
  const track = shown.tracks[gap.track];
  const length = gap.end - gap.begin;
  const name = (place: Gap["before"], otherwise: string): string =>
    place ? track.spanName(place.span) : otherwise;
  const found = [
    h("h2", {}, "Gap"),
    h("p", { class: "lead" }, gapTitle(shown, gap)),
    table([
      ["lasts", `${duration(length)}, ${percent(length / shown.end)} of the step`],
      ["after", name(gap.before, "the step's begin")],
      ["until", name(gap.after, "the step's end")],
    ]),
  ];
  const causes = context.causes[timeline];
  if (!causes.known) return found;
  const sentences = chainSentences(shown, chainOf(causes, gap));
  const lines = sentences.slice(0, SHOWN).map((sentence) => sentenceLine(context, timeline, sentence));
  if (sentences.length > SHOWN)
    lines.push(h("li", { class: "muted" }, `and so on, ${sentences.length - SHOWN} more`));
  found.push(section("Why", h("ol", { class: "chain why" }, ...lines)));
  return found;
}
