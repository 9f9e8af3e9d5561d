// What is under the pointer, in a small box beside it.
import type { Report } from "../data/report";
import type { Hit } from "../timeline/input";
import { chip, h, replace } from "./dom";
import { bytes, duration } from "./format";

export class Tooltip {
  readonly element = h("div", { class: "tooltip", hidden: true });

  constructor(private readonly report: Report) {}

  show(hit: Hit | null, x: number, y: number): void {
    const span = hit?.span ?? null;
    this.element.hidden = !hit || span === null;
    if (!hit || span === null) return;
    const timeline = this.report.timelines[hit.lane.timeline];
    const track = timeline.tracks[hit.lane.track];
    const label = track.label(span);
    const style = this.report.styles[track.labels.style[label]];
    const nbytes = track.labels.nbytes[label];
    const more = nbytes ? `, ${bytes(nbytes)}` : "";
    replace(
      this.element,
      h("strong", {}, chip(style.color), track.labels.name(label)),
      h("span", {}, `${duration(track.end[span] - track.start[span])}${more} · ${track.name}`),
      h("span", { class: "muted" }, timeline.origin(track.labels.origin[label])),
    );
    const parent = this.element.parentElement!;
    const { offsetWidth: wide, offsetHeight: high } = this.element;
    const left = x + 16 + wide > parent.clientWidth ? x - wide - 12 : x + 16;
    const top = y + 18 + high > parent.clientHeight ? y - high - 10 : y + 18;
    this.element.style.left = `${Math.max(4, left)}px`;
    this.element.style.top = `${Math.max(4, top)}px`;
  }
}
