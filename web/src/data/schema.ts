// The head of a block, as `src/piper/view/report_data.py` writes it.

/** A column: the kind of number, its first byte among all columns, and how many there are. */
export type Ref = [kind: string, at: number, length: number];
export type Ragged = [lengths: Ref, values: Ref];

export interface LabelRefs {
  name: Ref;
  short: Ref;
  kind: Ref;
  stream: Ref;
  phase: Ref;
  style: Ref;
  microbatch: Ref;
  origin: Ref;
  nbytes: Ref;
  talks: Ref;
  receives: Ref;
}

export interface SpanRefs {
  num: number;
  which: Ref | null;
  start: Ref;
  length: Ref;
  issued: Ref;
  waited: Ref | null;
  meeting: Ref;
  cause: Ref | null;
  why: Ref | null;
}

export interface MemoryRefs {
  times: Ref;
  held: Record<string, Ref>;
  peak: number;
  peak_time: number;
  slot: Ref;
  begin: Ref;
  end: Ref;
  task: Ref;
  own: Ref;
}

export interface TrackRows {
  name: string;
  ranks: string;
  first: number;
  num_ranks: number;
  labels: number;
  part: number;
  spans: SpanRefs;
  memory: MemoryRefs | null;
}

export interface PathRefs {
  track: Ref;
  span: Ref;
  begin: Ref;
  end: Ref;
  why: Ref;
  runs: Ref;
  by_kind: Record<string, number>;
  by_directive: Record<string, number>;
}

/** Parts of a step: they sum up to 1. */
export interface Shares {
  computing: number;
  exposed: number;
  bubble: number;
}

export interface StepShares {
  seconds: number;
  ranks: Shares;
  tracks: Shares[];
}

export interface TimelineRows {
  name: string;
  source: "measured" | "simulated" | "table";
  tick: number;
  unit: string;
  step: number;
  steps: number[];
  clock_error: number;
  host_computes: boolean;
  shares: StepShares | null;
  tracks: TrackRows[];
  directives: string[];
  path: PathRefs | null;
}

export interface SlotRefs {
  name: Ref;
  about: Ref;
  use: Ref;
  bound: Ref;
  planned: Ref;
  base: Ref;
  pool: Ref;
  passing: Ref;
}

export interface ClassRefs {
  slice: string;
  about: string;
  num: number;
  name: Ref;
  kind: Ref;
  stream: Ref;
  phase: Ref;
  origin: Ref;
  facts: Ref;
  leaves: Ref;
  group: Ref;
  key: Ref;
  reads: Ragged;
  writes: Ragged;
  frees: Ragged;
  waits: Ragged;
  overlaps: Ragged;
  slots: SlotRefs;
}

export interface DirectiveRow {
  code: string;
  name: string;
  source: string;
  effect: string;
  added: number;
  removed: number;
  changed: number;
  before: number | null;
  after: number | null;
  tasks: Record<string, number>;
  examples: string[];
  notes: string[];
}

export interface Talk {
  at: string;
  kind: string;
  stream: string;
  group: string;
  members: number;
  messages: number;
  nbytes: number;
}

export interface MatrixRefs {
  places: string[];
  by_class: boolean;
  kinds: string[];
  kind: Ref;
  source: Ref;
  target: Ref;
  nbytes: Ref;
  talks: Talk[];
}

export interface GraphNode {
  name: string;
  kind: string;
  phase: string;
  at: string;
  stream: string;
  origin: number;
  style: string;
  num: number;
  nbytes: number;
  tags: [string, number][];
  communicates: boolean;
}

export type GraphEdge = [source: number, target: number, num: number, nbytes: number];

export interface TaskGraph {
  nodes: GraphNode[];
  edges: GraphEdge[];
  selected: number[][];
}

export interface PlanRows {
  hash: string;
  strategy: string;
  mesh: string;
  num_ranks: number;
  num_microbatches: number;
  device: string;
  precision: string;
  peak: number;
  classes: ClassRefs[];
  directives: DirectiveRow[];
  traffic: MatrixRefs;
  graph: TaskGraph;
}

export interface StyleRow {
  key: string;
  meaning: string;
  color: string;
}

export interface Head {
  version: number;
  title: string;
  whys: Why[];
  categories: Record<string, string>;
  styles: StyleRow[];
  labels: LabelRefs[];
  plan: PlanRows | null;
  timelines: TimelineRows[];
  strings: string[];
}

export type Why = "data" | "stream" | "host" | "peer" | "begin" | "end";
