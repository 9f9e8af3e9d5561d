// Gaps and links in; sentences, with the spans that they name, out (src/piper/insight/reason_text.py).
import type { Place } from "../data/meetings";
import type { Timeline } from "../data/report";
import type { Why } from "../data/schema";
import type { Gap, Link } from "./gaps";

export type Word = string | { text: string; place: Place };
export type Sentence = Word[];

const NEEDS: Record<Why, string> = {
  data: "needs",
  stream: "is behind, on its stream,",
  host: "is behind, on its host,",
  peer: "waits for its peer",
  begin: "begins the step with",
  end: "has nothing left to compute; the step ends with",
};
const FOLLOWS: Record<Why, string> = {
  data: "needed by",
  stream: "before, on its stream,",
  host: "before, on its host,",
  peer: "came last for",
  begin: "before",
  end: "before",
};

export function gapTitle(timeline: Timeline, gap: Gap): string {
  const { name } = timeline.tracks[gap.track];
  const until = gap.after
    ? `until ${timeline.tracks[gap.after.track].spanName(gap.after.span)}`
    : "until the step's end";
  return `${name} computes nothing from ${range(gap.begin, gap.end)}, ${until}`;
}

export function chainSentences(timeline: Timeline, links: Link[]): Sentence[] {
  if (!links.length) return [["nothing that it waits for was missing: its host did something else"]];
  return links.map((link, number) => [
    `${number ? "which" : "it"} ${NEEDS[link.why]} `,
    ...linkWords(timeline, link),
  ]);
}

export function needs(timeline: Timeline, link: Link): Sentence {
  return [`${NEEDS[link.why]} `, ...linkWords(timeline, link)];
}

export function follows(timeline: Timeline, link: Link): Sentence {
  return [`${FOLLOWS[link.why]} `, ...linkWords(timeline, link)];
}

function linkWords(timeline: Timeline, link: Link): Sentence {
  const track = timeline.tracks[link.place.track];
  const origin = timeline.origin(track.labels.origin[track.label(link.place.span)]);
  return [
    { text: track.spanName(link.place.span), place: link.place },
    ` on ${track.name} (${range(link.begin, link.end)}; ${origin})`,
  ];
}

export function range(begin: number, end: number): string {
  return `${begin.toFixed(3)} to ${end.toFixed(3)} ms`;
}

export function plain(sentence: Sentence): string {
  return sentence.map((word) => (typeof word === "string" ? word : word.text)).join("");
}
