// Colours and their meanings, of what the timelines have.
import type { Report } from "../data/report";
import { chip, h } from "./dom";

export function legend(report: Report): HTMLElement {
  const used = new Set<number>();
  for (const timeline of report.timelines)
    for (const track of timeline.tracks)
      for (let label = 0; label < track.labels.length; label++) used.add(track.labels.style[label]);
  const overlaps = report.classes.some((found) => found.overlaps.length > 0);
  const items = report.styles
    .filter((style, number) => used.has(number) && style.key !== "F&B")
    .map((style) => h("span", {}, chip(style.color), style.meaning));
  if (overlaps) items.push(h("span", {}, h("span", { class: "chip pair" }), "overlapped pair"));
  return h("div", { class: "legend", "aria-label": "colours" }, ...items);
}

export function memoryLegend(report: Report): HTMLElement {
  const tracks = report.timelines.flatMap((timeline) => timeline.tracks);
  const used = Object.entries(report.categories).filter(([name]) =>
    tracks.some((track) => track.memory?.held.has(name)),
  );
  const items = used.map(([name, color]) => h("span", {}, chip(color), name));
  return h("div", { class: "legend" }, ...items);
}
