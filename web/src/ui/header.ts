// What plan this is, and its figures.
import type { Report, Timeline } from "../data/report";
import { bytes, count, duration, percent } from "./format";
import { h } from "./dom";

export function header(report: Report, toggleTheme: () => void, showHelp: () => void): HTMLElement {
  const { plan } = report;
  const facts = plan ? `plan ${plan.hash} · mesh ${plan.mesh} · ${plan.device} · ${plan.precision}` : "no plan";
  return h(
    "header",
    {},
    h("div", { class: "brand" }, "Piper"),
    h(
      "div",
      { class: "what" },
      h("h1", { title: report.title }, report.title),
      h("p", { class: "sub", title: facts }, facts),
    ),
    h("dl", { class: "figures" }, ...figures(report)),
    h(
      "div",
      { class: "buttons" },
      h("button", { id: "theme", title: "light or dark", onclick: toggleTheme }, "◐"),
      h("button", { id: "help-button", title: "keys (?)", onclick: showHelp }, "?"),
    ),
  );
}

function figures(report: Report): HTMLElement[] {
  const [first] = report.timelines;
  const ranks = report.plan?.num_ranks ?? first.tracks.reduce((sum, track) => sum + track.numRanks, 0);
  const found = [figure("ranks", count(ranks), "")];
  for (const timeline of report.timelines) {
    const more = report.timelines.length > 1 ? timeline.source : "";
    found.push(figure(`${more || timeline.source} step`, stepText(timeline), timeline.name));
  }
  if (report.plan)
    found.push(
      figure(
        "peak memory",
        bytes(report.plan.peak),
        "the most that a rank needs, task by task, as the plan's summary has it",
      ),
    );
  const { shares } = report.timelines[report.timelines.length - 1];
  if (shares) {
    const of = report.timelines.length > 1 ? `${report.timelines[report.timelines.length - 1].source}: ` : "";
    found.push(
      figure("computes", percent(shares.ranks.computing), `${of}share of the step, mean over ranks`),
      figure("exposed comm.", percent(shares.ranks.exposed), `${of}data moves and the rank computes nothing`),
      figure("bubble", percent(shares.ranks.bubble), `${of}neither computes nor moves data`),
    );
  }
  return found;
}

function stepText(timeline: Timeline): string {
  return timeline.unit === "s" ? duration(timeline.end) : `${timeline.end}`;
}

function figure(name: string, value: string, title: string): HTMLElement {
  return h("div", { class: "figure", title }, h("dt", {}, name), h("dd", {}, value));
}
