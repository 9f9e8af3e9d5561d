// The page: the block of data that it came with in; header, tabs and their views out.
import { Answers } from "./answers";
import { unpack } from "./data/block";
import type { Place } from "./data/meetings";
import { Report } from "./data/report";
import { Panel } from "./details/panel";
import { DirectiveList } from "./graph/directives";
import { GraphView } from "./graph/view";
import { Keys } from "./keys";
import { Store } from "./state";
import type { Tab } from "./state";
import "./style.css";
import { Hit, Input, visit } from "./timeline/input";
import { Overview } from "./timeline/overview";
import { Picture } from "./timeline/picture";
import { Viewport } from "./timeline/viewport";
import { TrafficView } from "./traffic/view";
import { h, replace } from "./ui/dom";
import { header } from "./ui/header";
import { Help } from "./ui/help";
import { legend, memoryLegend } from "./ui/legend";
import { Search } from "./ui/search";
import { Themes } from "./ui/theme";
import { Toolbar } from "./ui/toolbar";
import { Tooltip } from "./ui/tooltip";

interface View {
  elements: HTMLElement[];
  resize: () => void;
}

function start(report: Report): void {
  const themes = new Themes();
  const store = new Store();
  const viewport = new Viewport(report.end);
  const help = new Help();
  const pictures = {
    timeline: new Picture(report, store, themes, viewport, "timeline"),
    memory: new Picture(report, store, themes, viewport, "memory"),
  };
  const tooltip = new Tooltip(report);
  const overview = new Overview(report, themes, viewport, () => pictures[pictureTab()].ask());
  const pictureTab = (): "timeline" | "memory" => (store.state.tab === "memory" ? "memory" : "timeline");
  const goTo = (timeline: number, place: Place): void => {
    store.set({ tab: "timeline" });
    visit(pictures.timeline, store, timeline, place);
  };
  const panel = new Panel(report, store, goTo);
  const search = new Search(report, goTo);
  const hover = (hit: Hit | null, x: number, y: number): void => {
    tooltip.show(hit, x, y);
    const { hovered, pinned } = store.state;
    const span = hit?.span ?? null;
    if (!hit || span === null) {
      if (hovered) store.set(pinned ? { hovered: null } : { hovered: null, microbatch: null });
      return;
    }
    const { timeline, track } = hit.lane;
    if (hovered?.timeline === timeline && hovered.place.track === track && hovered.place.span === span) return;
    const found = report.timelines[timeline].tracks[track];
    const microbatch = found.labels.microbatch[found.label(span)];
    const place = { timeline, place: { track, span } };
    const free = store.state.directive === null && !store.state.path;
    const stands = free && microbatch >= 0 ? microbatch : null;
    store.set(pinned ? { hovered: place } : { hovered: place, microbatch: stands });
  };
  const inputs = {
    timeline: new Input(pictures.timeline, store, hover),
    memory: new Input(pictures.memory, store, () => undefined),
  };
  const traffic = new TrafficView(report, themes);
  const graph = report.plan ? new GraphView(report, store, themes) : null;
  const views: Record<Tab, View> = {
    timeline: pictureView(pictures.timeline, overview, panel, legend(report), tooltip.element),
    memory: pictureView(pictures.memory, overview, panel, memoryLegend(report)),
    communication: { elements: [traffic.element], resize: () => traffic.resize() },
    graph: graph
      ? { elements: [new DirectiveList(report, store).element, graph.element], resize: () => graph.resize() }
      : { elements: [h("p", { class: "empty" }, "There is no plan, and so no graph.")], resize: () => undefined },
  };
  const main = h("main");
  const show = (): void => {
    main.dataset.tab = store.state.tab;
    replace(main, ...views[store.state.tab].elements);
    views[store.state.tab].resize();
  };
  store.on((changed) => {
    if (changed.has("tab")) show();
  });
  document.title = `Piper: ${report.title}`;
  document.body.append(
    header(report, () => themes.toggle(), () => help.toggle()),
    new Toolbar(report, store, search.element).element,
    main,
    help.element,
  );
  new Keys(store, pictures, inputs, graph, help, search).listen();
  addEventListener("resize", () => views[store.state.tab].resize());
  const followed = pictures.timeline.draw.bind(pictures.timeline);
  pictures.timeline.draw = () => {
    followed();
    overview.draw();
  };
  show();
  Object.assign(window, { piper: { report, store, pictures, viewport, answers: new Answers(panel.context) } });
  document.documentElement.dataset.ready = "yes";
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

const block = document.getElementById("piper-data");
unpack(block?.textContent ?? "")
  .then((found) => start(new Report(found)))
  .catch((error: unknown) => {
    document.body.append(h("p", { class: "empty" }, `This report cannot be shown: ${String(error)}`));
    throw error;
  });
