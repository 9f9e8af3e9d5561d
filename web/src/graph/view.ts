// The graph on a canvas that zooms and moves: chunks and communication, and what a directive did to them.
import type { Report } from "../data/report";
import type { GraphNode, TaskGraph } from "../data/schema";
import type { Store } from "../state";
import { h } from "../ui/dom";
import { bytes, count } from "../ui/format";
import type { Themes } from "../ui/theme";
import type { GraphLayout } from "./layout";
import { HIGH, layoutOf, WIDE } from "./layout";
import { Moment } from "./moment";

const FONT = '11px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';
const SMALL = '10px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';
const INK = "#17202c";

export class GraphView {
  readonly element = h("div", { class: "graph-box" });
  private readonly canvas = h("canvas", { class: "graph", tabindex: 0, "aria-label": "graph of tasks" });
  private readonly tip = h("div", { class: "graph-tip", hidden: true });
  private readonly graph: TaskGraph;
  private readonly layout: GraphLayout;
  private scale = 1;
  private x = 0;
  private y = 0;
  private placed = false;
  private pointed = -1;
  private asked = false;
  private moment_: Moment;

  constructor(
    private readonly report: Report,
    private readonly store: Store,
    private readonly themes: Themes,
  ) {
    this.graph = report.plan!.graph;
    this.layout = layoutOf(this.graph);
    this.moment_ = new Moment(this.graph, report.plan!.directives, Infinity);
    this.element.append(this.canvas, this.tip);
    this.listen();
    store.on(() => this.ask());
    themes.onChange(() => this.ask());
  }

  private listen(): void {
    const { canvas } = this;
    canvas.addEventListener(
      "wheel",
      (event) => {
        event.preventDefault();
        if (event.shiftKey) this.x -= event.deltaY;
        else this.zoom(event.offsetX, event.offsetY, Math.exp(-event.deltaY * 0.0018));
        this.ask();
      },
      { passive: false },
    );
    canvas.addEventListener("pointerdown", (event) => canvas.setPointerCapture(event.pointerId));
    canvas.addEventListener("pointermove", (event) => {
      if (event.buttons === 1) {
        this.x += event.movementX;
        this.y += event.movementY;
      }
      this.point(event.offsetX, event.offsetY);
      this.ask();
    });
    canvas.addEventListener("pointerleave", () => this.point(-1, -1));
  }

  /** Look where another one did, of the same plan. */
  follow(other: GraphView): void {
    [this.x, this.y, this.scale, this.placed] = [other.x, other.y, other.scale, other.placed];
  }

  private zoom(x: number, y: number, factor: number): void {
    const scale = Math.min(Math.max(this.scale * factor, 0.03), 2);
    this.x = x - ((x - this.x) * scale) / this.scale;
    this.y = y - ((y - this.y) * scale) / this.scale;
    this.scale = scale;
  }

  /** W, S, A and D, as in the timeline. */
  key(key: string): boolean {
    const { clientWidth: width, clientHeight: height } = this.element;
    if (key === "w") this.zoom(width / 2, height / 2, 1.15);
    else if (key === "s") this.zoom(width / 2, height / 2, 1 / 1.15);
    else if (key === "a") this.x += width * 0.08;
    else if (key === "d") this.x -= width * 0.08;
    else if (key === "f") this.fit();
    else return false;
    this.ask();
    return true;
  }

  private fit(): void {
    const { clientWidth: width, clientHeight: height } = this.element;
    const whole = Math.min((width - 24) / this.layout.width, (height - 24) / this.layout.height);
    const tall = (height - 24) / this.layout.height;
    this.scale = Math.min(1, Math.max(whole, Math.min(Math.max(tall, 0.45), 0.8)));
    this.x = 12;
    this.y = Math.max(12, (height - this.layout.height * this.scale) / 2);
  }

  resize(): void {
    const ratio = devicePixelRatio || 1;
    const { clientWidth: width, clientHeight: height } = this.element;
    if (!width) return;
    this.canvas.width = width * ratio;
    this.canvas.height = height * ratio;
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    if (!this.placed) this.fit();
    this.placed = true;
    this.ask();
  }

  private ask(): void {
    if (this.asked || !this.canvas.isConnected) return;
    this.asked = true;
    requestAnimationFrame(() => {
      this.asked = false;
      this.draw();
    });
  }

  private point(x: number, y: number): void {
    const [gx, gy] = [(x - this.x) / this.scale, (y - this.y) / this.scale];
    this.pointed = this.layout.boxes.findIndex(
      (box, i) => this.shown(i) && gx >= box.x && gx <= box.x + WIDE && gy >= box.y && gy <= box.y + HIGH,
    );
    this.tip.hidden = this.pointed < 0;
    if (this.pointed < 0) return;
    const node = this.graph.nodes[this.pointed];
    this.tip.replaceChildren(...this.tipLines(node));
    const width = this.element.clientWidth;
    this.tip.style.left = `${Math.min(x + 14, width - 320)}px`;
    this.tip.style.top = `${y + 14}px`;
  }

  private tipLines(node: GraphNode): HTMLElement[] {
    const { directives } = this.report.plan!;
    const from = directives[node.origin];
    const size = node.nbytes ? `, ${bytes(node.nbytes)} in all` : "";
    const lines = [
      h("strong", {}, this.moment.name(this.pointed)),
      h("span", {}, `${node.kind} at ${node.at}, ${count(this.moment.num(this.pointed))} a step on each rank${size}`),
      h("span", {}, from ? from.code : "the traced program"),
    ];
    if (from?.source) lines.push(h("span", { class: "muted" }, from.source));
    return lines;
  }

  /** Up to which directive the graph is drawn: the chosen one, or all of them. */
  private get upto(): number {
    const { directive, before } = this.store.state;
    if (directive === null) return Infinity;
    return before ? directive - 1 : directive;
  }

  private get moment(): Moment {
    const { upto } = this;
    if (this.moment_.upto !== upto) this.moment_ = new Moment(this.graph, this.report.plan!.directives, upto);
    return this.moment_;
  }

  private shown(node: number): boolean {
    return this.moment.has(node);
  }

  private draw(): void {
    const context = this.canvas.getContext("2d");
    if (!context) return;
    const ratio = devicePixelRatio || 1;
    const { surface } = this.themes;
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.fillStyle = surface.page;
    context.fillRect(0, 0, this.canvas.width, this.canvas.height);
    context.setTransform(this.scale * ratio, 0, 0, this.scale * ratio, this.x * ratio, this.y * ratio);
    for (const [i, band] of this.layout.bands.entries()) {
      context.fillStyle = i % 2 ? surface.laneOdd : surface.lane;
      context.fillRect(0, band.y, this.layout.width, band.height);
      context.fillStyle = surface.muted;
      context.font = `600 ${FONT}`;
      context.textBaseline = "middle";
      context.textAlign = "left";
      const left = Math.max(10, -this.x / this.scale + 10);
      context.fillText(band.name, left, band.y + 13);
    }
    this.drawEdges(context);
    this.graph.nodes.forEach((node, i) => this.drawNode(context, node, i));
  }

  private drawEdges(context: CanvasRenderingContext2D): void {
    const { surface } = this.themes;
    const { boxes } = this.layout;
    const [left, right] = [-this.x / this.scale, (this.element.clientWidth - this.x) / this.scale];
    for (const [source, target] of this.moment.edges) {
      const [from, to] = [boxes[source], boxes[target]];
      if (Math.max(from.x, to.x) + WIDE < left || Math.min(from.x, to.x) > right) continue;
      const near = source === this.pointed || target === this.pointed;
      context.strokeStyle = near ? surface.accent : surface.faint;
      context.globalAlpha = near ? 1 : 0.5;
      context.lineWidth = near ? 2 : 1;
      context.beginPath();
      curve(context, from.x, from.y, to.x, to.y);
      context.stroke();
    }
    context.globalAlpha = 1;
  }

  private drawNode(context: CanvasRenderingContext2D, node: GraphNode, i: number): void {
    if (!this.shown(i)) return;
    const { surface } = this.themes;
    const { x, y } = this.layout.boxes[i];
    const { directive, before } = this.store.state;
    const named = directive !== null && (this.graph.selected[directive] ?? []).includes(i);
    const made = directive !== null && !before && node.origin === directive && !node.phase;
    const key = this.moment.style(i);
    const color = this.report.styles.find((style) => style.key === key)!.color;
    context.globalAlpha = directive === null || named || made || i === this.pointed ? 1 : 0.45;
    context.fillStyle = node.communicates ? surface.page : color;
    context.strokeStyle = named || made ? surface.accent : node.communicates ? color : surface.line;
    context.lineWidth = named || made ? 3 : node.communicates ? 2 : 1;
    context.beginPath();
    context.roundRect(x, y, WIDE, HIGH, node.communicates ? HIGH / 2 : 5);
    context.fill();
    context.stroke();
    if (this.scale < 0.3) {
      context.globalAlpha = 1;
      return;
    }
    context.fillStyle = node.communicates ? surface.text : INK;
    context.textAlign = "center";
    context.font = FONT;
    context.fillText(fitted(context, node.communicates ? node.kind : this.moment.name(i), WIDE - 18), x + WIDE / 2, y + 12);
    context.font = SMALL;
    context.globalAlpha *= 0.72;
    context.fillText(fitted(context, this.about(node, i), WIDE - 18), x + WIDE / 2, y + 25);
    context.globalAlpha = 1;
  }

  /** How many, and where: as far as the directives up to now say. */
  private about(node: GraphNode, i: number): string {
    const placed = this.moment.placed(i) && node.at !== "*";
    return `×${this.moment.num(i)}${placed ? ` · ${node.at}` : ""}`;
  }
}

function curve(context: CanvasRenderingContext2D, x0: number, y0: number, x1: number, y1: number): void {
  const [fy, ty] = [y0 + HIGH / 2, y1 + HIGH / 2];
  if (x1 > x0) {
    const reach = (x1 - x0 - WIDE) / 2 + 6;
    context.moveTo(x0 + WIDE, fy);
    context.bezierCurveTo(x0 + WIDE + reach, fy, x1 - reach, ty, x1, ty);
  } else if (x1 < x0) {
    const reach = (x0 - x1 - WIDE) / 2 + 6;
    context.moveTo(x0, fy);
    context.bezierCurveTo(x0 - reach, fy, x1 + WIDE + reach, ty, x1 + WIDE, ty);
  } else {
    const [from, to] = y1 > y0 ? [y0 + HIGH, y1] : [y0, y1 + HIGH];
    context.moveTo(x0 + WIDE / 2, from);
    context.lineTo(x1 + WIDE / 2, to);
  }
}

function fitted(context: CanvasRenderingContext2D, text: string, room: number): string {
  if (context.measureText(text).width <= room) return text;
  let length = text.length;
  while (length > 1 && context.measureText(`${text.slice(0, length)}…`).width > room) length--;
  return `${text.slice(0, length)}…`;
}
