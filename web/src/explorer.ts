// A report with the store of what the user looks at in; its tabs out. It can take the place of another one.
import { Answers } from "./answers";
import type { Window } from "./carried";
import type { Place } from "./data/meetings";
import type { Report } from "./data/report";
import { Panel } from "./details/panel";
import { DirectiveList } from "./graph/directives";
import { GraphView } from "./graph/view";
import type { ReportTab, Store } from "./state";
import { Hit, Input, visit } from "./timeline/input";
import { Overview } from "./timeline/overview";
import { Picture } from "./timeline/picture";
import { Viewport } from "./timeline/viewport";
import { TrafficView } from "./traffic/view";
import { h } from "./ui/dom";
import { legend, memoryLegend } from "./ui/legend";
import { Search } from "./ui/search";
import type { Themes } from "./ui/theme";
import { Tooltip } from "./ui/tooltip";

export interface View {
  elements: HTMLElement[];
  resize: () => void;
}

export class Explorer {
  readonly viewport: Viewport;
  readonly pictures: { timeline: Picture; memory: Picture };
  readonly inputs: { timeline: Input; memory: Input };
  readonly panel: Panel;
  readonly search: Search;
  readonly graph: GraphView | null;
  readonly views: Record<ReportTab, View>;
  readonly answers: Answers;
  private readonly tooltip: Tooltip;

  constructor(
    readonly report: Report,
    private readonly store: Store,
    themes: Themes,
  ) {
    this.viewport = new Viewport(report.end);
    this.pictures = {
      timeline: new Picture(report, store, themes, this.viewport, "timeline"),
      memory: new Picture(report, store, themes, this.viewport, "memory"),
    };
    this.tooltip = new Tooltip(report);
    const overview = new Overview(report, themes, this.viewport, () => this.shown.ask());
    const goTo = (timeline: number, place: Place): void => {
      store.set({ tab: "timeline" });
      visit(this.pictures.timeline, store, timeline, place);
    };
    this.panel = new Panel(report, store, goTo);
    this.search = new Search(report, goTo);
    this.inputs = {
      timeline: new Input(this.pictures.timeline, store, (hit, x, y) => this.hover(hit, x, y)),
      memory: new Input(this.pictures.memory, store, () => undefined),
    };
    const traffic = new TrafficView(report, themes);
    const graph = report.plan ? new GraphView(report, store, themes) : null;
    this.graph = graph;
    const { pictures, panel } = this;
    this.views = {
      timeline: pictureView(pictures.timeline, overview, panel, legend(report), this.tooltip.element),
      memory: pictureView(pictures.memory, overview, panel, memoryLegend(report)),
      communication: { elements: [traffic.element], resize: () => traffic.resize() },
      graph: graph
        ? { elements: [new DirectiveList(report, store).element, graph.element], resize: () => graph.resize() }
        : { elements: [h("p", { class: "empty" }, "There is no plan, and so no graph.")], resize: () => undefined },
    };
    const followed = this.pictures.timeline.draw.bind(this.pictures.timeline);
    this.pictures.timeline.draw = () => {
      followed();
      overview.draw();
    };
    this.answers = new Answers(this.panel.context);
  }

  private get shown(): Picture {
    return this.pictures[this.store.state.tab === "memory" ? "memory" : "timeline"];
  }

  /** Before it is shown: look at a window of time, and else where another one did. */
  follow(other: Explorer, { begin, end }: Window): void {
    this.viewport.set(begin, end);
    for (const name of ["timeline", "memory"] as const)
      this.pictures[name].scroll = other.pictures[name].scroll;
    this.search.text = other.search.text;
    if (this.graph && other.graph) this.graph.follow(other.graph);
  }

  /** A key that is held, or all of them. */
  release(key?: string): void {
    this.inputs.timeline.release(key);
    this.inputs.memory.release(key);
  }

  private hover(hit: Hit | null, x: number, y: number): void {
    const { store } = this;
    this.tooltip.show(hit, x, y);
    const { hovered, pinned } = store.state;
    const span = hit?.span ?? null;
    if (!hit || span === null) {
      if (hovered) store.set(pinned ? { hovered: null } : { hovered: null, microbatch: null });
      return;
    }
    const { timeline, track } = hit.lane;
    if (hovered?.timeline === timeline && hovered.place.track === track && hovered.place.span === span) return;
    const found = this.report.timelines[timeline].tracks[track];
    const microbatch = found.labels.microbatch[found.label(span)];
    const place = { timeline, place: { track, span } };
    const free = store.state.directive === null && !store.state.path;
    const stands = free && microbatch >= 0 ? microbatch : null;
    store.set(pinned ? { hovered: place } : { hovered: place, microbatch: stands });
  }
}

function pictureView(
  picture: Picture,
  overview: Overview,
  panel: Panel,
  colors: HTMLElement,
  ...more: HTMLElement[]
): View {
  const box = h("div", { class: "picture-box" }, picture.canvas, ...more);
  const strip = h("div", { class: "overview-box" });
  const left = h("div", { class: "left" }, strip, box, colors);
  return {
    elements: [left, panel.element],
    resize: () => {
      strip.append(overview.canvas);
      overview.resize();
      picture.resize();
    },
  };
}
