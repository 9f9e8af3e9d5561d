// Page: header, tabs and what they show. The report may come later than the page, and be exchanged.
import { carried } from "./carried";
import type { Report } from "./data/report";
import type { View } from "./explorer";
import { Explorer } from "./explorer";
import { Keys } from "./keys";
import { Store } from "./state";
import type { Tab } from "./state";
import { h, replace } from "./ui/dom";
import { Help } from "./ui/help";
import type { Themes } from "./ui/theme";
import { Toolbar } from "./ui/toolbar";

export const REPORT_TABS: [Tab, string][] = [
  ["timeline", "Timeline"],
  ["memory", "Memory"],
  ["communication", "Communication"],
  ["graph", "Graph & directives"],
];

export class Page {
  explorer: Explorer | null = null;
  readonly help: Help;
  private readonly head = h("div", { class: "head" });
  private readonly bar = h("div");
  private readonly main = h("main");
  /** What tests know by name: `piper` in the window. */
  readonly named: Record<string, unknown>;
  private lasting = { store: 0, themes: 0 };

  /** `instead` is what a tab shows as long as there is no report, or which is not of the report. */
  constructor(
    readonly tabs: [Tab, string][],
    readonly store: Store,
    readonly themes: Themes,
    private readonly instead: (tab: Tab) => View,
  ) {
    this.help = new Help(tabs);
    this.named = { store };
    Object.assign(window, { piper: this.named });
    store.on((changed) => {
      if (changed.has("tab")) this.showTab();
    });
    document.body.append(this.head, this.bar, this.main, this.help.element);
    new Keys(this).listen();
    addEventListener("resize", () => this.view.resize());
    this.keep();
  }

  /** Who listens by now is not of a report, and listens to the end. */
  keep(): void {
    this.lasting = { store: this.store.listeners.mark(), themes: this.themes.listeners.mark() };
  }

  set header(element: HTMLElement) {
    replace(this.head, element);
  }

  /** In place of the report that was shown, if any. */
  show(report: Report | null, more: (() => HTMLElement)[] = []): void {
    const { store, themes, explorer: before } = this;
    before?.release();
    const typing = before?.search.focused;
    const scrolled = before?.panel.element.scrollTop ?? 0;
    store.listeners.forget(this.lasting.store);
    themes.listeners.forget(this.lasting.themes);
    const window = before && report ? carried(before.report, report, store, before.viewport) : null;
    this.explorer = report && new Explorer(report, store, themes);
    if (this.explorer && before && window) this.explorer.follow(before, window);
    const search = this.explorer?.search.element ?? null;
    replace(this.bar, new Toolbar(this.tabs, report, store, search, more).element);
    this.showTab();
    if (!this.explorer) return;
    const { pictures, viewport, answers } = this.explorer;
    Object.assign(this.named, { report, pictures, viewport, answers });
    this.explorer.panel.element.scrollTop = scrolled;
    if (typing) this.explorer.search.focus();
  }

  private get view(): View {
    const { tab } = this.store.state;
    return this.explorer && tab !== "training" ? this.explorer.views[tab] : this.instead(tab);
  }

  private showTab(): void {
    this.main.dataset.tab = this.store.state.tab;
    replace(this.main, ...this.view.elements);
    this.view.resize();
  }
}
