// The directives, one after the other: the code, the user's line, and what each did to the graph.
import type { Report } from "../data/report";
import type { DirectiveRow } from "../data/schema";
import type { Store } from "../state";
import { h, replace } from "../ui/dom";
import { count } from "../ui/format";
import { Moment } from "./moment";

export class DirectiveList {
  readonly element = h("div", { class: "directives" });

  constructor(
    private readonly report: Report,
    private readonly store: Store,
  ) {
    store.on((changed) => {
      if (changed.has("directive") || changed.has("before")) this.draw();
    });
    this.draw();
  }

  private draw(): void {
    const { directives } = this.report.plan!;
    const { directive, before } = this.store.state;
    replace(
      this.element,
      h("h2", {}, "Directives"),
      h(
        "p",
        { class: "lead" },
        directive === null
          ? "Choose one to see the graph before and after it."
          : "Outlined: what it names, and what came from it.",
      ),
      h(
        "div",
        { class: "switch" },
        ...(["before", "after", "whole plan"] as const).map((name) =>
          h(
            "button",
            {
              class: this.is(name) ? "chosen" : "",
              disabled: directive === null && name !== "whole plan",
              onclick: () => this.show(name),
            },
            name,
          ),
        ),
      ),
      ...directives.map((row, number) =>
        card(row, number, number === directive ? this.touched(row, number) : null, before, () => this.choose(number)),
      ),
    );
    this.element.querySelector(".card.chosen")?.scrollIntoView({ block: "nearest" });
  }

  /** Chunks that a directive names, where it changed any. */
  private touched(row: DirectiveRow, number: number): string[] {
    if (!row.changed) return [];
    const { graph, directives } = this.report.plan!;
    const moment = new Moment(graph, directives, number);
    return graph.selected[number].filter((node) => moment.has(node)).map((node) => moment.name(node));
  }

  private is(name: string): boolean {
    const { directive, before } = this.store.state;
    if (directive === null) return name === "whole plan";
    return name === (before ? "before" : "after");
  }

  private show(name: "before" | "after" | "whole plan"): void {
    if (name === "whole plan") this.store.set({ directive: null, before: false });
    else this.store.set({ before: name === "before" });
  }

  private choose(number: number): void {
    const { directive } = this.store.state;
    this.store.set({ directive: directive === number ? null : number, before: false, microbatch: null, pinned: false });
  }
}

function card(
  row: DirectiveRow,
  number: number,
  touched: string[] | null,
  before: boolean,
  choose: () => void,
): HTMLElement {
  const chosen = touched !== null;
  const tasks = Object.entries(row.tasks).filter(([kind]) => kind !== "run");
  const logical = [
    row.before !== null && row.after !== null
      ? h("span", { class: "count" }, `${beforeAfter(row.before, row.after)} nodes`)
      : null,
    row.added ? h("span", { class: "added" }, `+${count(row.added)}`) : null,
    row.removed ? h("span", { class: "removed" }, `−${count(row.removed)}`) : null,
    row.changed ? h("span", { class: "changed" }, `${count(row.changed)} changed`) : null,
  ];
  return h(
    "button",
    { class: `card${chosen ? " chosen" : ""}`, onclick: choose, "data-directive": number },
    h("span", { class: "card-number" }, String(number + 1)),
    h("code", {}, row.code),
    row.source ? h("span", { class: "source" }, row.source) : null,
    h("span", { class: "counts" }, ...logical),
    tasks.length
      ? h(
          "span",
          { class: "muted" },
          `in the plan: ${tasks.map(([kind, num]) => `${count(num)} ${kind}`).join(", ")}`,
        )
      : null,
    chosen && touched.length
      ? h("span", { class: "example changes" }, `~ ${few(touched)}`)
      : null,
    ...(chosen && !before ? row.examples.map((name) => h("span", { class: "example" }, `+ ${name}`)) : []),
    ...(chosen ? row.notes.map((note) => h("span", { class: "muted" }, note)) : []),
  );
}

function beforeAfter(before: number, after: number): string {
  return before === after ? count(after) : `${count(before)} → ${count(after)}`;
}

const SHOWN = 8;

function few(names: string[]): string {
  const more = names.length > SHOWN ? ` and ${names.length - SHOWN} more` : "";
  return names.slice(0, SHOWN).join(" ") + more;
}
