// Charts: a training in; what is drawn of it, as far as it is measured, out.
import { bytes, duration, percent } from "../ui/format";
import type { ChartKind, Line } from "./chart";
import { number, rate } from "./numbers";
import type { Training } from "./training";

export function chartKinds(training: Training): ChartKind[] {
  const { curves, facts, metrics } = training;
  const unit = facts?.unit ?? "samples";
  const loss = { title: "Loss", lines: beside(training, "loss"), text: number, axis: plain, fromZero: false };
  const speed = { title: `${capital(unit)} per second`, lines: [alone("per_second")], text: rate, hasPeaks: true };
  const time = { title: "Time of a step", lines: [alone("ms")], text: duration, hasPeaks: true, marks: true };
  const memory = { title: "Memory", lines: [alone("memory", false)], text: bytes, axis: wholeBytes, unit: power };
  const norm = { title: "Norm of gradients", lines: [alone("norm")], text: number, axis: plain };
  const lr = { title: "Learning rate", lines: [alone("lr", false)], text: plain };
  const mfu = { title: "MFU", lines: [alone("mfu")], text: percent };
  const measured = [speed, time, memory, norm, lr, mfu].filter(
    (kind) => (kind !== norm && kind !== mfu) || curves.has(kind.lines[0].curve),
  );
  const found: ChartKind[] = [loss, ...measured.map((kind) => ({ ...kind, fromZero: true }))];
  for (const name of metrics)
    found.push({
      title: capital(name.replace(/^metric /, "")),
      lines: beside(training, name),
      text: number,
      axis: plain,
      fromZero: false,
    });
  return found;
}

function alone(curve: string, noisy = true): Line {
  return { name: curve, curve, color: "accent", noisy };
}

/** With that of evaluations, if there are any. */
function beside({ curves }: Training, curve: string): Line[] {
  const lines: Line[] = curves.has(curve) || curve === "loss" ? [{ ...alone(curve), name: "training" }] : [];
  const other = `evaluation ${curve}`;
  if (curves.has(other)) lines.push({ name: "evaluation", curve: other, color: "evaluation", noisy: false });
  return lines;
}

/** Without zeros that say nothing. */
function plain(value: number): string {
  const text = number(value);
  return text.includes("e") ? text.replace(/\.?0+e/, "e") : String(Number(text));
}

function wholeBytes(value: number): string {
  return bytes(value).replace(/\.0 /, " ");
}

/** Round numbers of bytes are of the largest unit below the most. */
function power(most: number): number {
  return most > 0 ? 1024 ** Math.floor(Math.log(most) / Math.log(1024)) : 1;
}

function capital(word: string): string {
  return word.charAt(0).toUpperCase() + word.slice(1);
}
