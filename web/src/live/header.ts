// What training this is, how far it is, and its latest figures.
import { h, replace } from "../ui/dom";
import { count, duration } from "../ui/format";
import type { Feed } from "./feed";
import { clock, number, rate } from "./numbers";
import type { Training } from "./training";

export function liveHeader(
  training: Training,
  feed: Feed,
  toggleTheme: () => void,
  showHelp: () => void,
): HTMLElement {
  const title = h("h1", {}, "Training");
  const sub = h("p", { class: "sub" });
  const figures = h("dl", { class: "figures" });
  const pill = h("span", { class: "pill", role: "status" });
  const draw = (): void => {
    const { facts } = training;
    const known = facts && `plan ${facts.plan} · mesh ${facts.mesh} · ${facts.device} · ${facts.precision}`;
    title.textContent = title.title = facts?.title ?? "Training";
    sub.textContent = sub.title = known ?? "the ranks are launched";
    const name = feed.lost === null ? training.status.name : "no connection";
    if (pill.textContent !== name) pill.textContent = name;
    pill.dataset.state = feed.lost === null ? training.status.name : "lost";
    pill.title = feed.lost === null ? training.status.text : `it is tried again every ${feed.lost} s`;
    replace(figures, ...rows(training).map(([word, value]) => figure(word, value)));
    document.title = [step(training), facts?.title, "Piper"].filter(Boolean).join(" · ");
  };
  training.changed.add(draw);
  feed.changed.add(draw);
  draw();
  return h(
    "header",
    {},
    h("div", { class: "brand" }, "Piper"),
    h("div", { class: "what" }, title, sub),
    pill,
    figures,
    h(
      "div",
      { class: "buttons" },
      h("button", { id: "theme", title: "light or dark", onclick: toggleTheme }, "◐"),
      h("button", { id: "help-button", title: "keys (?)", onclick: showHelp }, "?"),
    ),
  );
}

function step({ step, facts }: Training): string {
  return facts?.steps ? `${count(step)} / ${count(facts.steps)}` : count(step);
}

function rows(training: Training): [string, string][] {
  const { curves, facts, eta } = training;
  const last = (name: string): number | null => curves.get(name)?.last ?? null;
  const found: [string, string][] = [["step", step(training)]];
  const loss = last("loss");
  if (loss !== null) found.push(["loss", number(loss)]);
  const evaluation = last("evaluation loss");
  if (evaluation !== null) found.push(["evaluation", number(evaluation)]);
  const speed = last("per_second");
  if (speed !== null) found.push([`${facts?.unit ?? "samples"}/s`, rate(speed)]);
  const ms = last("ms");
  if (ms !== null) found.push(["a step", duration(ms)]);
  if (eta !== null && !training.isDone) found.push(["left", clock(eta)]);
  return found;
}

function figure(name: string, value: string): HTMLElement {
  return h("div", { class: "figure" }, h("dt", {}, name), h("dd", {}, value));
}
