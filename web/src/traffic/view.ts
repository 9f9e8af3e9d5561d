// Communication: a matrix of bytes between ranks, by kind, and the table of who talks in which group.
import type { Report } from "../data/report";
import type { Talk } from "../data/schema";
import { chip, h, replace } from "../ui/dom";
import { bytes, count } from "../ui/format";
import type { Themes } from "../ui/theme";

const EDGE = 34;
const NAMED = 60; // pixels of a cell that has room for its bytes
const COLUMNS = ["kind", "from", "stream", "times", "sends", "group"];
const NUMBERS = ["times", "sends"];

export class TrafficView {
  readonly element = h("div", { class: "traffic" });
  private readonly canvas = h("canvas", { class: "matrix", "aria-label": "bytes between ranks" });
  private readonly note = h("p", { class: "matrix-note" });
  private readonly kinds = h("div", { class: "kinds" });
  private readonly rows = h("tbody");
  private kind: string | null = null;
  private cells = new Float64Array();
  private size = 0;

  constructor(
    private readonly report: Report,
    private readonly themes: Themes,
  ) {
    const { plan } = report;
    if (!plan) {
      replace(this.element, h("p", { class: "empty" }, "There is no plan: who talks to whom is not known."));
      return;
    }
    this.size = plan.traffic.places.length;
    const what = plan.traffic.by_class ? "class of ranks" : "rank";
    replace(
      this.element,
      h(
        "section",
        { class: "matrix-side" },
        h("h2", {}, `Bytes from ${what} to ${what}, a step`),
        this.kinds,
        h("div", { class: "matrix-box" }, this.canvas),
        this.note,
      ),
      h(
        "section",
        { class: "talk-side" },
        h("h2", {}, "Who talks in which group, each rank"),
        h(
          "div",
          { class: "scroll" },
          h(
            "table",
            { class: "talks" },
            h(
              "thead",
              {},
              h("tr", {}, ...COLUMNS.map((name) => h("th", { class: NUMBERS.includes(name) ? "number" : "" }, name))),
            ),
            this.rows,
          ),
        ),
        h(
          "p",
          { class: "hint" },
          "A message takes its bytes from one rank to another. What a rank's link carries in a collective is spread evenly over the other members.",
        ),
      ),
    );
    this.canvas.addEventListener("pointermove", (event) => this.point(event.offsetX, event.offsetY));
    this.canvas.addEventListener("pointerleave", () => this.tell(null));
    themes.onChange(() => this.draw());
    this.choose(null);
  }

  private choose(kind: string | null): void {
    const { traffic } = this.report.plan!;
    this.kind = kind;
    const all = [null, ...traffic.kinds];
    replace(
      this.kinds,
      ...all.map((each) =>
        h(
          "button",
          { class: each === kind ? "chosen" : "", onclick: () => this.choose(each) },
          each ? chip(this.color(each)) : null,
          each ?? "all kinds",
        ),
      ),
    );
    const { block } = this.report;
    const [kinds, from, to] = [traffic.kind, traffic.source, traffic.target].map((ref) => block.numbers(ref));
    const sizes = block.numbers(traffic.nbytes);
    this.cells = new Float64Array(this.size * this.size);
    for (let i = 0; i < sizes.length; i++)
      if (!kind || traffic.kinds[kinds[i]] === kind) this.cells[from[i] * this.size + to[i]] += sizes[i];
    replace(this.rows, ...traffic.talks.filter((talk) => !kind || talk.kind === kind).map((talk) => this.row(talk)));
    this.tell(null);
    this.draw();
  }

  private color(kind: string): string {
    return (this.report.styles.find((style) => style.key === kind) ?? this.report.styles[0]).color;
  }

  private row(talk: Talk): HTMLElement {
    return h(
      "tr",
      {},
      h("td", {}, chip(this.color(talk.kind)), talk.kind),
      h("td", {}, talk.at),
      h("td", {}, talk.stream),
      h("td", { class: "number" }, count(talk.messages)),
      h("td", { class: "number" }, bytes(talk.nbytes)),
      h("td", { class: "group" }, h("div", { title: talk.group }, talk.group.replaceAll(" -> ", "→"))),
    );
  }

  resize(): void {
    this.draw();
  }

  private get cell(): number {
    const box = this.canvas.parentElement!.getBoundingClientRect();
    const room = Math.min(box.width, box.height) - EDGE;
    return Math.max(1, Math.min(96, room / this.size));
  }

  private draw(): void {
    if (!this.size || !this.canvas.isConnected || !this.canvas.parentElement?.clientWidth) return;
    const { surface } = this.themes;
    const ratio = devicePixelRatio || 1;
    const cell = this.cell;
    const side = EDGE + cell * this.size + 1;
    this.canvas.width = side * ratio;
    this.canvas.height = side * ratio;
    this.canvas.style.width = this.canvas.style.height = `${side}px`;
    const context = this.canvas.getContext("2d")!;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    const most = this.cells.reduce((a, b) => Math.max(a, b), 0);
    const color = this.kind ? this.color(this.kind) : surface.accent;
    const gap = cell > 6 ? 1 : 0;
    for (let from = 0; from < this.size; from++)
      for (let to = 0; to < this.size; to++) {
        const nbytes = this.cells[from * this.size + to];
        context.globalAlpha = 1;
        context.fillStyle = from === to ? surface.laneOdd : surface.lane;
        const box = [EDGE + to * cell, EDGE + from * cell, cell - gap, cell - gap] as const;
        context.fillRect(...box);
        if (!nbytes) continue;
        context.globalAlpha = 0.07 + (cell >= NAMED ? 0.55 : 0.93) * Math.sqrt(nbytes / most);
        context.fillStyle = color;
        context.fillRect(...box);
      }
    context.globalAlpha = 1;
    this.drawNumbers(context, cell);
    if (cell >= NAMED) this.drawBytes(context, cell);
  }

  private drawBytes(context: CanvasRenderingContext2D, cell: number): void {
    context.textAlign = "center";
    context.fillStyle = this.themes.surface.text;
    this.cells.forEach((nbytes, i) => {
      const [x, y] = [i % this.size, Math.floor(i / this.size)];
      if (nbytes) context.fillText(bytes(nbytes), EDGE + (x + 0.5) * cell, EDGE + (y + 0.5) * cell);
    });
  }

  private drawNumbers(context: CanvasRenderingContext2D, cell: number): void {
    const { places } = this.report.plan!.traffic;
    context.font = "10px system-ui, sans-serif";
    context.fillStyle = this.themes.surface.muted;
    context.textBaseline = "middle";
    const step = [1, 2, 4, 8, 16, 32, 64].find((step) => step * cell >= 22) ?? 128;
    for (let place = 0; place < this.size; place += step) {
      const at = EDGE + (place + 0.5) * cell;
      context.textAlign = "center";
      context.fillText(places[place], at, EDGE - 10);
      context.textAlign = "right";
      context.fillText(places[place], EDGE - 6, at);
    }
    context.fillStyle = this.themes.surface.faint;
    context.textAlign = "left";
    context.fillText("to →", EDGE, 8);
    context.fillText("from", 0, EDGE - 10);
  }

  private point(x: number, y: number): void {
    const cell = this.cell;
    const [to, from] = [Math.floor((x - EDGE) / cell), Math.floor((y - EDGE) / cell)];
    const inside = to >= 0 && from >= 0 && to < this.size && from < this.size;
    this.tell(inside ? [from, to] : null);
  }

  private tell(place: [number, number] | null): void {
    const { traffic } = this.report.plan!;
    const what = traffic.by_class ? "" : "rank ";
    if (!place) {
      const total = this.cells.reduce((a, b) => a + b, 0);
      this.note.textContent = `${bytes(total)} in all${this.kind ? ` by ${this.kind}` : ""}`;
      return;
    }
    const [from, to] = place;
    const nbytes = this.cells[from * this.size + to];
    this.note.textContent = `${what}${traffic.places[from]} → ${what}${traffic.places[to]}: ${bytes(nbytes)}`;
  }
}
