// The tab of a training: its charts, and beside them how far it is and what has happened.
import { h, replace } from "../ui/dom";
import { count, plural } from "../ui/format";
import type { Themes } from "../ui/theme";
import { Chart } from "./chart";
import type { Look } from "./chart";
import { chartKinds } from "./charts";
import { clock, timeOfDay } from "./numbers";
import type { Training } from "./training";

const COLUMNS = 12;
const IN_A_ROW = 3;
const LEAST = 4; // pixels that a drag must have to choose steps

export class TrainingView {
  private readonly charts = h("div", { class: "charts" });
  private readonly side = h("aside", { id: "training-side", "aria-live": "polite" });
  readonly elements = [this.charts, this.side];
  private drawn: Chart[] = [];
  private shape = "";
  private cursor: number | null = null;
  private chosen: [number, number] | null = null; // steps that are looked at
  private dragged: number | null = null;
  private log = false;
  private asked = false;

  constructor(
    private readonly training: Training,
    private readonly themes: Themes,
    private readonly lookInto: () => void,
  ) {
    training.changed.add(() => this.ask());
    themes.onChange(() => this.ask());
    setInterval(() => this.ask(), 1000); // of a clock
  }

  resize(): void {
    for (const chart of this.drawn) chart.resize();
    this.draw();
  }

  private ask(): void {
    if (this.asked || !this.charts.isConnected) return;
    this.asked = true;
    requestAnimationFrame(() => {
      this.asked = false;
      this.draw();
    });
  }

  private get look(): Look {
    const steps = this.training.curves.get("loss")?.steps ?? [];
    const [first, last] = this.chosen ?? [steps[0] ?? 0, Math.max(this.training.step, (steps[0] ?? 0) + 1)];
    return { first, last, cursor: this.cursor, log: this.log };
  }

  private draw(): void {
    const kinds = chartKinds(this.training);
    const shape = JSON.stringify(kinds);
    if (shape !== this.shape) {
      this.shape = shape;
      this.drawn = kinds.map((kind) => this.listened(new Chart(kind, this.themes)));
      this.drawn.forEach((chart, number) => {
        chart.element.style.gridColumn = `span ${number ? span(number - 1, kinds.length - 1) : COLUMNS}`;
      });
      const loss = this.drawn[0].element.querySelector("figcaption")!;
      loss.append(this.logSwitch());
      replace(this.charts, ...this.drawn.map((chart) => chart.element));
      for (const chart of this.drawn) chart.resize();
    }
    const { look } = this;
    for (const chart of this.drawn) chart.draw(this.training.curves, look, this.training.recorded?.steps ?? []);
    replace(this.side, ...sideOf(this.training, this.lookInto));
  }

  private logSwitch(): HTMLElement {
    const button = h("button", { class: "small", title: "a logarithmic axis of the loss" }, "log");
    button.addEventListener("click", () => {
      this.log = !this.log;
      button.classList.toggle("chosen", this.log);
      this.ask();
    });
    return button;
  }

  /** The pointer is in all charts at once; a drag chooses steps, a double click all of them. */
  private listened(chart: Chart): Chart {
    const { canvas } = chart;
    const at = (event: MouseEvent): number => chart.stepAt(event.offsetX, this.look);
    canvas.title = "drag to look at some steps; double-click for all";
    canvas.addEventListener("pointermove", (event) => {
      this.cursor = at(event);
      this.ask();
    });
    canvas.addEventListener("pointerleave", () => {
      this.cursor = null;
      this.ask();
    });
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      this.dragged = event.offsetX;
    });
    canvas.addEventListener("pointerup", (event) => {
      const from = this.dragged;
      this.dragged = null;
      if (from === null || Math.abs(event.offsetX - from) < LEAST) return;
      const steps = [chart.stepAt(from, this.look), at(event)].sort((a, b) => a - b);
      this.chosen = [Math.floor(steps[0]), Math.max(Math.ceil(steps[1]), Math.floor(steps[0]) + 1)];
      this.ask();
    });
    canvas.addEventListener("dblclick", () => {
      this.chosen = null;
      this.ask();
    });
    return chart;
  }
}

/** Columns of a chart: rows have three, or as many less as lets all be full. */
function span(number: number, num: number): number {
  const rows = Math.ceil(num / IN_A_ROW);
  let [row, before] = [0, 0];
  for (; ; row++) {
    const size = Math.ceil((num - before) / (rows - row));
    if (number < before + size) return COLUMNS / size;
    before += size;
  }
}

function sideOf(training: Training, lookInto: () => void): HTMLElement[] {
  const { facts, status, step, eta, isDone, notes, recorded } = training;
  const total = facts?.steps ?? null;
  const ran = facts ? (isDone ? status.at : Date.now() / 1e3) - facts.begun : 0;
  const found: HTMLElement[] = [
    h("h2", {}, total ? `Step ${count(step)} of ${count(total)}` : `Step ${count(step)}`),
    h("p", { class: "lead" }, sentence(training, ran)),
  ];
  if (total)
    found.push(
      h(
        "div",
        { class: "progress", role: "progressbar", "aria-valuenow": step, "aria-valuemax": total },
        h("div", { class: `progress-fill ${status.name}`, style: `width:${Math.min(1, step / total) * 100}%` }),
      ),
    );
  if (status.name === "failed") found.push(h("pre", { class: "failure" }, status.text));
  if (facts) {
    const rows: [string, string][] = [
      ["ranks", `${plural(facts.ranks, "rank")}, ${facts.device}`],
      ["mesh", facts.mesh],
      ["began", timeOfDay(facts.begun)],
    ];
    if (eta !== null && !isDone) rows.push(["ends", `about ${timeOfDay(Date.now() / 1e3 + eta)}`]);
    found.push(
      h("table", { class: "facts" }, ...rows.map(([word, text]) => h("tr", {}, h("th", {}, word), h("td", {}, text)))),
    );
  }
  if (recorded) {
    const what = h("button", { class: "look-into", onclick: lookInto }, `Step ${count(recorded.step)}, task by task`);
    found.push(h("section", {}, h("h3", {}, "Recorded last"), what));
  }
  if (notes.length)
    found.push(h("section", {}, h("h3", {}, "What happened"), h("ul", { class: "notes" }, ...lines(training))));
  return found;
}

function sentence({ status, eta }: Training, ran: number): string {
  const after = `after ${clock(ran)}`;
  switch (status.name) {
    case "starting":
      return status.text || "The ranks are launched.";
    case "ended":
      return `Ended ${after}.`;
    case "failed":
    case "interrupted":
      return `${status.name === "failed" ? "Failed" : "Interrupted"} ${after}.`;
    default: {
      const doing = { running: "Running", evaluating: "Evaluating", saving: "Saving" }[status.name];
      return `${doing} for ${clock(ran)}${eta === null ? "" : `, about ${clock(eta)} to go`}.`;
    }
  }
}

function lines({ notes }: Training): HTMLElement[] {
  return [...notes]
    .reverse()
    .map(({ kind, text, at }) => h("li", { class: kind }, h("time", {}, timeOfDay(at)), h("span", {}, text)));
}
