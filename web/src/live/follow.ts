// Follow: the page of a training that goes on. Its report is that of the step that was recorded last.
import type { Report } from "../data/report";
import { h } from "../ui/dom";
import { Themes } from "../ui/theme";
import type { View } from "../explorer";
import { Page, REPORT_TABS } from "../page";
import { Store } from "../state";
import type { Tab } from "../state";
import { Feed } from "./feed";
import { liveHeader } from "./header";
import { Training } from "./training";
import { TrainingView } from "./view";

export function follow(): void {
  const [themes, store, training] = [new Themes(), new Store(), new Training()];
  store.set({ tab: "training" });
  const view = new TrainingView(training, themes, () => store.set({ tab: "timeline" }));
  const waiting = h("p", { class: "empty" });
  const instead = (tab: Tab): View =>
    tab === "training" ? view : { elements: [waiting], resize: () => undefined };
  const page = new Page([["training", "Training"], ...REPORT_TABS], store, themes, instead);
  const feed = new Feed(training);
  page.header = liveHeader(training, feed, () => themes.toggle(), () => page.help.toggle());
  const steps = new StepsShown(page, feed, training, waiting);
  store.on((changed) => {
    if (changed.has("tab") || changed.has("follow")) void steps.update();
  });
  page.keep();
  page.show(null);
  training.changed.add(() => void steps.update());
  document.addEventListener("visibilitychange", () => void steps.update());
  Object.assign(page.named, { training });
  document.documentElement.dataset.ready = "yes";
}

/** Fetches a recorded step when somebody looks, or at the end: to make its report takes the server time. */
class StepsShown {
  private shown = 0;
  private fetching = false;
  private isLast = false;

  constructor(
    private readonly page: Page,
    private readonly feed: Feed,
    private readonly training: Training,
    private readonly waiting: HTMLElement,
  ) {}

  async update(): Promise<void> {
    const { recorded, facts, over } = this.training;
    const { tab, follow } = this.page.store.state;
    if (!this.page.explorer) this.waiting.textContent = this.why(facts?.records ?? true);
    if (!recorded || this.fetching || this.isLast) return;
    if (recorded.number <= this.shown || (this.shown && !follow)) return;
    this.isLast = over; // the server waits for this one request, and is gone then
    if (!over && (tab === "training" || document.hidden)) return;
    this.fetching = true;
    try {
      const [number, report] = (await this.feed.latest()) ?? [recorded.number, null];
      this.shown = number;
      if (report) this.page.show(report, [() => this.step(report), () => this.hold()]);
    } catch {
      if (!this.page.explorer) this.waiting.textContent = `Step ${recorded.step} could not be fetched.`;
    } finally {
      this.fetching = false;
    }
    if (this.training.recorded !== recorded) void this.update();
  }

  private why(records: boolean): string {
    const { recorded, isDone } = this.training;
    if (recorded) return `Step ${recorded.step} was recorded, and is on its way.`;
    if (!records) return "No step is recorded: --watch-every 0.";
    return isDone ? "No step was recorded." : "The first recorded step will stand here.";
  }

  private step(report: Report): HTMLElement {
    return h("span", { class: "of-step" }, report.timelines[0].name);
  }

  private hold(): HTMLElement {
    const { store } = this.page;
    const { follow } = store.state;
    return h(
      "button",
      {
        class: follow ? "chosen" : "",
        "aria-pressed": follow ? "true" : "false",
        "data-switch": "follow",
        title: follow ? "shows each step that is recorded; press to keep this one" : "this step is kept",
        onclick: () => store.set({ follow: !follow }),
      },
      "Follow",
    );
  }
}
