// A box for names: Enter goes from span to span whose name has the text, in the order of time.
import type { Place } from "../data/meetings";
import type { Report } from "../data/report";
import { h } from "./dom";

interface Match {
  timeline: number;
  place: Place;
  start: number;
}

export class Search {
  private readonly input = h("input", {
    type: "search",
    placeholder: "Find a task",
    title: "key /; Enter and Shift + Enter go from one to the next",
    "aria-label": "find a task",
    onkeydown: (event) => this.key(event as KeyboardEvent),
    oninput: () => this.find(),
  });
  private readonly count = h("span", { class: "found" });
  readonly element = h("span", { class: "search" }, this.input, this.count);
  private matches: Match[] = [];
  private at = -1;

  constructor(
    private readonly report: Report,
    private readonly visit: (timeline: number, place: Place) => void,
  ) {}

  get text(): string {
    return this.input.value;
  }

  set text(text: string) {
    this.input.value = text;
    this.find();
  }

  get focused(): boolean {
    return document.activeElement === this.input;
  }

  focus(): void {
    this.input.focus();
    this.input.select();
  }

  private find(): void {
    const wanted = this.input.value.trim().toLowerCase();
    this.matches = [];
    this.at = -1;
    if (wanted)
      this.report.timelines.forEach((timeline, number) =>
        timeline.tracks.forEach((track, place) => {
          const named = Uint8Array.from({ length: track.labels.length }, (_, label) =>
            Number(track.labels.name(label).toLowerCase().includes(wanted)),
          );
          for (let span = 0; span < track.num; span++)
            if (named[track.label(span)])
              this.matches.push({ timeline: number, place: { track: place, span }, start: track.start[span] });
        }),
      );
    this.matches.sort((a, b) => a.timeline - b.timeline || a.start - b.start);
    this.tell();
  }

  private key(event: KeyboardEvent): void {
    event.stopPropagation();
    if (event.key === "Escape") this.input.blur();
    if (event.key !== "Enter" || !this.matches.length) return;
    const { length } = this.matches;
    this.at = (this.at + (event.shiftKey ? -1 : 1) + length) % length;
    const { timeline, place } = this.matches[this.at];
    this.visit(timeline, place);
    this.tell();
  }

  private tell(): void {
    const { length } = this.matches;
    this.count.textContent = !this.input.value.trim() ? "" : `${this.at < 0 ? "" : `${this.at + 1} of `}${length}`;
  }
}
