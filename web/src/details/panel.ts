// The panel beside a picture: what is chosen, and why it is as it is; else where the step goes.
import type { Place } from "../data/meetings";
import type { Report } from "../data/report";
import { Causes } from "../explain/causes";
import { TaskBook } from "../explain/task";
import type { State, Store } from "../state";
import { h, replace } from "../ui/dom";
import { gapDetails } from "./gap";
import { memoryDetails } from "./memory";
import { spanDetails } from "./span";
import { stepDetails } from "./step";

export interface Context {
  report: Report;
  store: Store;
  book: TaskBook;
  causes: Causes[];
  /** Select a span and bring it into view. */
  visit: (timeline: number, place: Place) => void;
}

export class Panel {
  readonly element = h("aside", { id: "details", "aria-live": "polite" });
  readonly context: Context;
  private asked = false;

  constructor(report: Report, store: Store, visit: Context["visit"]) {
    this.context = {
      report,
      store,
      book: new TaskBook(report.classes, report.plan?.directives ?? []),
      causes: report.timelines.map((timeline) => new Causes(timeline, report.classes)),
      visit,
    };
    store.on((changed) => {
      const live = store.state.tab === "memory" && (changed.has("cursor") || changed.has("memory"));
      if (changed.has("selection") || changed.has("tab") || live) this.ask();
    });
    this.draw();
  }

  private ask(): void {
    if (this.asked) return;
    this.asked = true;
    requestAnimationFrame(() => {
      this.asked = false;
      this.draw();
    });
  }

  private draw(): void {
    replace(this.element, ...this.content(this.context.store.state));
  }

  private content(state: State): HTMLElement[] {
    const { context } = this;
    if (state.tab === "memory") return memoryDetails(context);
    const { selection } = state;
    if (selection?.kind === "span") return spanDetails(context, selection.timeline, selection.place);
    if (selection?.kind === "gap") return gapDetails(context, selection.timeline, selection.gap);
    return stepDetails(context);
  }
}
