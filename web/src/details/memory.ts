// What is alive on a rank at the cursor.
import { aliveAt } from "../memory/alive";
import { h } from "../ui/dom";
import { bytes, plural } from "../ui/format";
import type { Context } from "./panel";
import { section } from "./sentences";
import { bar } from "./step";

const SHOWN = 24;

export function memoryDetails(context: Context): HTMLElement[] {
  const { report, store } = context;
  const { selection, cursor, memory } = store.state;
  const fixed = selection?.kind === "memory" ? selection : null;
  const at = fixed ?? (memory && cursor !== null ? { ...memory, time: cursor } : peakPlace(context));
  if (!at) return [h("h2", {}, "Memory"), h("p", { class: "muted" }, "No plan: nothing is known of memory.")];
  const track = report.timelines[at.timeline].tracks[at.track];
  const found = aliveAt(report, context.book, at.timeline, at.track, at.time);
  if (!found) return [h("h2", {}, "Memory")];
  const where = fixed ? "at the click" : memory && cursor !== null ? "at the cursor" : "at its most";
  return [
    h("h2", {}, `Alive on ${track.name}`),
    h("p", { class: "lead" }, `${where}, ${at.time.toFixed(3)} ms, ${report.timelines[at.timeline].source}`),
    h("p", { class: "big", id: "alive-total" }, bytes(found.total)),
    section(
      "By kind",
      ...found.byCategory.map(([name, nbytes]) =>
        bar(name, nbytes / found.total, bytes(nbytes), report.categories[name] ?? ""),
      ),
    ),
    section(
      `Tensors (${plural(found.tensors.length, "tensor")})`,
      h(
        "table",
        { class: "alive" },
        ...found.tensors.slice(0, SHOWN).map((tensor) =>
          h(
            "tr",
            { title: tensor.task ? report.timelines[at.timeline].origin(tensor.origin) : "" },
            h("td", { class: "number" }, bytes(tensor.nbytes)),
            h(
              "td",
              {},
              h("span", { class: "tensor" }, tensor.name),
              h(
                "span",
                { class: "muted" },
                `${tensor.category}, ${tensor.task ? `from ${tensor.task}` : "from before the step"}`,
              ),
            ),
          ),
        ),
      ),
    ),
    h("p", { class: "hint" }, "Optimizer state has no tensors of its own here. What depends on the data counts at its bound."),
  ];
}

/** Where a rank has most alive of all. */
function peakPlace(context: Context): { timeline: number; track: number; time: number } | null {
  let best: { timeline: number; track: number; time: number } | null = null;
  let most = 0;
  context.report.timelines.forEach((timeline, number) =>
    timeline.tracks.forEach(({ memory }, track) => {
      if (memory && memory.peak > most) {
        most = memory.peak;
        best = { timeline: number, track, time: memory.peakTime };
      }
    }),
  );
  return best;
}
