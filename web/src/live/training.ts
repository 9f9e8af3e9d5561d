// Training: events of the server in, as src/piper/training/watch.py makes them; what is known so far out.
import { Listeners } from "../listeners";
import { Curve } from "./curve";
import type { Point } from "./curve";

export interface Facts {
  title: string;
  step: number;
  steps: number | null;
  ranks: number;
  mesh: string;
  plan: string;
  device: string;
  precision: string;
  unit: string;
  begun: number;
  records: boolean;
}

export interface Status {
  name: "starting" | "running" | "evaluating" | "saving" | "ended" | "failed" | "interrupted";
  text: string;
  at: number;
}

export interface Note {
  kind: "note" | "warning" | "checkpoint";
  text: string;
  at: number;
}

interface Numbers {
  step: number;
  values: Record<string, number | null>;
  eta?: number | null;
}

export interface Recorded {
  number: number;
  step: number;
  /** With those before it. */
  steps: number[];
}

export type Event =
  | ["curves", Record<string, Point[]>]
  | ["numbers", Numbers]
  | ["facts", Facts]
  | ["state", Status]
  | ["note", Note]
  | ["recorded", Recorded]
  | ["over", object];

const NOTES = 200;

export class Training {
  readonly curves = new Map<string, Curve>();
  notes: Note[] = [];
  facts: Facts | null = null;
  status: Status = { name: "starting", text: "", at: Date.now() / 1e3 };
  step = 0;
  eta: number | null = null;
  recorded: Recorded | null = null;
  over = false;
  readonly changed = new Listeners<[]>();

  take(events: Event[]): void {
    for (const event of events) this.takeOne(event);
    this.changed.tell();
  }

  private takeOne([name, value]: Event): void {
    switch (name) {
      case "curves": // the whole history: what was known is in it
        this.curves.clear();
        for (const [curve, points] of Object.entries(value)) this.curves.set(curve, new Curve(points));
        this.step = Math.max(0, ...[...this.curves.values()].map((curve) => curve.steps.at(-1) ?? 0));
        this.notes = [];
        break;
      case "numbers":
        for (const [curve, number] of Object.entries(value.values)) this.curve(curve).add(value.step, number);
        this.step = value.step;
        if (value.eta !== undefined) this.eta = value.eta;
        break;
      case "facts":
        this.facts = value;
        this.step = Math.max(this.step, value.step);
        break;
      case "state":
        this.status = value;
        break;
      case "note":
        this.notes.push(value);
        if (this.notes.length > NOTES) this.notes.shift();
        break;
      case "recorded":
        this.recorded = value;
        break;
      case "over":
        this.over = true;
    }
  }

  private curve(name: string): Curve {
    let found = this.curves.get(name);
    if (!found) this.curves.set(name, (found = new Curve()));
    return found;
  }

  /** The names of what training measured beside its loss. */
  get metrics(): string[] {
    const names = [...this.curves.keys()].map((name) => name.replace(/^evaluation /, ""));
    return [...new Set(names.filter((name) => name.startsWith("metric ")))];
  }

  get isDone(): boolean {
    return ["ended", "failed", "interrupted"].includes(this.status.name);
  }
}
