// The whole step in a strip: how many ranks compute at each time, and the window that is shown below.
import type { Report } from "../data/report";
import type { Themes } from "../ui/theme";
import { GUTTER } from "./picture";
import type { Viewport } from "./viewport";

export const STRIP = 34;

export class Overview {
  readonly canvas: HTMLCanvasElement;
  private width = 0;
  private busy: Float32Array = new Float32Array();

  constructor(
    private readonly report: Report,
    private readonly themes: Themes,
    private readonly viewport: Viewport,
    moved: () => void,
  ) {
    this.canvas = document.createElement("canvas");
    this.canvas.className = "overview";
    this.canvas.title = "the whole step: how many ranks compute; drag to move the window";
    const drag = (event: PointerEvent): void => {
      if (event.buttons !== 1) return;
      const { begin, end } = viewport.whole;
      const at = begin + ((event.offsetX - GUTTER) / (this.width - GUTTER)) * (end - begin);
      viewport.set(at - viewport.length / 2, at + viewport.length / 2);
      moved();
    };
    this.canvas.addEventListener("pointerdown", (event) => {
      this.canvas.setPointerCapture(event.pointerId);
      drag(event);
    });
    this.canvas.addEventListener("pointermove", drag);
    themes.onChange(() => this.draw());
  }

  resize(): void {
    const box = this.canvas.parentElement?.getBoundingClientRect();
    if (!box?.width) return;
    const ratio = devicePixelRatio || 1;
    this.width = Math.floor(box.width);
    this.canvas.width = this.width * ratio;
    this.canvas.height = STRIP * ratio;
    this.canvas.style.width = `${this.width}px`;
    this.canvas.style.height = `${STRIP}px`;
    this.busy = this.use(this.width - GUTTER);
    this.draw();
  }

  /** Per pixel, the share of the ranks of the first timeline that compute. */
  private use(width: number): Float32Array {
    const found = new Float32Array(width);
    const { begin, end } = this.viewport.whole;
    const scale = width / (end - begin);
    const timeline = this.report.timelines[0];
    for (const track of timeline.tracks)
      for (let span = 0; span < track.num; span++) {
        if (track.talks(span)) continue;
        const from = (track.start[span] - begin) * scale;
        const to = (track.end[span] - begin) * scale;
        for (let x = from | 0; x <= (to | 0) && x < width; x++)
          found[x] += Math.min(to, x + 1) - Math.max(from, x);
      }
    return found.map((share) => Math.min(1, share / timeline.tracks.length));
  }

  draw(): void {
    const context = this.canvas.getContext("2d");
    if (!context || this.width <= GUTTER) return;
    const { surface } = this.themes;
    const ratio = devicePixelRatio || 1;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.fillStyle = surface.page;
    context.fillRect(0, 0, this.width, STRIP);
    context.fillStyle = surface.lane;
    context.fillRect(GUTTER, 3, this.width - GUTTER, STRIP - 6);
    context.fillStyle = this.report.styles[0].color;
    for (let x = 0; x < this.busy.length; x++) {
      const height = this.busy[x] * (STRIP - 8);
      context.fillRect(GUTTER + x, STRIP - 3 - height, 1, height);
    }
    const { begin, end } = this.viewport.whole;
    const at = (time: number): number =>
      GUTTER + ((time - begin) / (end - begin)) * (this.width - GUTTER);
    const [from, to] = [at(this.viewport.begin), at(this.viewport.end)];
    context.fillStyle = surface.page;
    context.globalAlpha = 0.62;
    context.fillRect(GUTTER, 3, from - GUTTER, STRIP - 6);
    context.fillRect(to, 3, this.width - to, STRIP - 6);
    context.globalAlpha = 1;
    context.strokeStyle = surface.accent;
    context.lineWidth = 1.5;
    context.strokeRect(from + 0.75, 3, Math.max(to - from - 1.5, 2), STRIP - 6);
    context.fillStyle = surface.faint;
    context.font = "10px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.fillText("ranks that compute", 12, STRIP / 2);
  }
}
