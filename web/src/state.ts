// What the user looks at: one object that all parts of the page read and change.
import type { Place } from "./data/meetings";
import type { Gap } from "./explain/gaps";
import { Listeners } from "./listeners";

export type ReportTab = "timeline" | "memory" | "communication" | "graph";
export type Tab = "training" | ReportTab;

export type Selection =
  | { kind: "span"; timeline: number; place: Place }
  | { kind: "gap"; timeline: number; gap: Gap }
  | { kind: "memory"; timeline: number; track: number; time: number };

export interface Pointed {
  timeline: number;
  place: Place;
}

export interface State {
  tab: Tab;
  selection: Selection | null;
  hovered: Pointed | null;
  /** The microbatch that stands out: of what is hovered, or pinned. */
  microbatch: number | null;
  pinned: boolean;
  path: boolean;
  paired: boolean;
  directive: number | null;
  /** Show the graph before the chosen directive, not after it. */
  before: boolean;
  /** The time under the pointer. */
  cursor: number | null;
  /** The rank whose memory is read at the cursor. */
  memory: { timeline: number; track: number } | null;
  /** Of a training that goes on, show each step that is recorded. */
  follow: boolean;
}

export class Store {
  readonly state: State = {
    tab: "timeline",
    selection: null,
    hovered: null,
    microbatch: null,
    pinned: false,
    path: false,
    paired: false,
    directive: null,
    before: false,
    cursor: null,
    memory: null,
    follow: true,
  };
  readonly listeners = new Listeners<[Set<keyof State>]>();

  on(listener: (changed: Set<keyof State>) => void): void {
    this.listeners.add(listener);
  }

  set(patch: Partial<State>): void {
    const changed = new Set<keyof State>();
    for (const key of Object.keys(patch) as (keyof State)[]) {
      if (this.state[key] !== patch[key]) changed.add(key);
    }
    Object.assign(this.state, patch);
    if (changed.size) this.listeners.tell(changed);
  }
}
