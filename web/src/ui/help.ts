// The keys, in a box.
import type { Tab } from "../state";
import { h } from "./dom";

const KEYS: [string, string][] = [
  ["W  S", "zoom in and out at the pointer"],
  ["A  D", "move left and right"],
  ["Ctrl + wheel", "zoom; the wheel alone scrolls ranks, or zooms if all are seen"],
  ["Shift + wheel, drag", "move"],
  ["click", "choose a span or a gap: why it is there; its microbatch stands out"],
  ["F", "focus what is chosen, or the whole step"],
  ["← →", "the span before or after on the same stream"],
  ["/", "find a task by its name; Enter goes to the next"],
  ["P", "critical path"],
  ["M", "keep or drop the microbatch that stands out"],
  ["Esc", "choose nothing"],
];

export class Help {
  readonly element: HTMLDialogElement;

  constructor(tabs: [Tab, string][]) {
    const numbers = tabs.map((_, number) => number + 1).join(" ");
    const keys = [...KEYS, [numbers, tabs.map(([tab]) => tab).join(", ")], ["?", "this help"]];
    this.element = h(
      "dialog",
      { id: "help", "aria-label": "keys" },
      h("h2", {}, "Keys and mouse"),
      h("dl", {}, ...keys.flatMap(([key, what]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, what)])),
      h("button", { onclick: () => this.element.close() }, "Close"),
    );
    this.element.addEventListener("click", (event) => {
      if (event.target === this.element) this.element.close();
    });
  }

  toggle(): void {
    if (this.element.open) this.element.close();
    else this.element.showModal();
  }
}
