// Sentences in; lines whose spans can be clicked, out.
import type { Sentence } from "../explain/words";
import { h } from "../ui/dom";
import type { Context } from "./panel";

export function sentenceLine(context: Context, timeline: number, sentence: Sentence): HTMLElement {
  const words = sentence.map((word) =>
    typeof word === "string"
      ? word
      : h(
          "button",
          { class: "task", onclick: () => context.visit(timeline, word.place) },
          word.text,
        ),
  );
  return h("li", {}, ...words);
}

export function directiveLine(context: Context, timeline: number, origin: number): HTMLElement {
  const code = context.report.timelines[timeline].origin(origin);
  const source = context.report.sourceOf(origin);
  return h(
    "div",
    { class: "directive-line" },
    h("code", {}, code),
    source ? h("span", { class: "source" }, source) : null,
  );
}

export function section(title: string, ...children: (HTMLElement | null)[]): HTMLElement {
  return h("section", {}, h("h3", {}, title), ...children);
}

export function table(rows: [string, string][]): HTMLElement {
  return h(
    "table",
    { class: "facts" },
    ...rows.map(([name, value]) => h("tr", {}, h("th", {}, name), h("td", {}, value))),
  );
}
