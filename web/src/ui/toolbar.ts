// Tabs, and the switches of the timeline.
import type { Report } from "../data/report";
import type { Store, Tab } from "../state";
import { h, replace } from "./dom";

export class Toolbar {
  readonly element = h("nav", { class: "toolbar" });

  /** `more` are switches beside those of the report. */
  constructor(
    private readonly tabs: [Tab, string][],
    private readonly report: Report | null,
    private readonly store: Store,
    private readonly search: HTMLElement | null,
    private readonly more: (() => HTMLElement)[],
  ) {
    store.on((changed) => {
      const shown = ["tab", "path", "paired", "microbatch", "pinned", "directive", "follow"] as const;
      if (shown.some((name) => changed.has(name))) this.draw();
    });
    this.draw();
  }

  private draw(): void {
    const { state } = this.store;
    const tabs = this.tabs.map(([tab, name], number) =>
      h(
        "button",
        {
          class: `tab${state.tab === tab ? " chosen" : ""}`,
          "data-tab": tab,
          title: `key ${number + 1}`,
          onclick: () => this.store.set({ tab }),
        },
        name,
      ),
    );
    replace(this.element, h("div", { class: "tabs" }, ...tabs), h("div", { class: "switches" }, ...this.switches()));
  }

  private switches(): (HTMLElement | null)[] {
    const { report } = this;
    const { state } = this.store;
    if (!report || state.tab === "training") return [];
    const more = this.more.map((make) => make());
    if (state.tab !== "timeline") return more;
    const two = report.timelines.length > 1;
    return [
      this.standsOut(),
      this.search,
      report.timelines.some((timeline) => timeline.path)
        ? this.toggle("path", "Critical path", "P", state.path)
        : null,
      two ? this.toggle("paired", "Pair ranks", "", state.paired) : null,
      ...more,
    ];
  }

  private standsOut(): HTMLElement | null {
    const { microbatch, directive } = this.store.state;
    if (microbatch === null && directive === null) return null;
    const text =
      microbatch !== null
        ? `microbatch ${microbatch}`
        : (this.report?.plan?.directives[directive!]?.code ?? "a directive");
    return h(
      "button",
      {
        class: "stands-out",
        title: "show all again",
        onclick: () => this.store.set({ microbatch: null, pinned: false, directive: null }),
      },
      h("span", {}, text),
      "✕",
    );
  }

  private toggle(name: "path" | "paired", text: string, key: string, on: boolean): HTMLElement {
    return h(
      "button",
      {
        class: on ? "chosen" : "",
        "aria-pressed": on ? "true" : "false",
        "data-switch": name,
        title: key ? `key ${key}` : "",
        onclick: () => this.store.set({ [name]: !on, microbatch: null, pinned: false }),
      },
      text,
    );
  }
}
