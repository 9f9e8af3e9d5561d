// Where nodes of the graph stand: lanes by phase, columns by how far forward comes, a backward below its forward.
import type { GraphNode, TaskGraph } from "../data/schema";

export const WIDE = 132;
export const HIGH = 34;
const COLUMN = 164;
const ROW = 44;
const LANE = 30; // room above a lane, for its name

export interface Box {
  x: number;
  y: number;
}

export interface Band {
  name: string;
  y: number;
  height: number;
}

export interface GraphLayout {
  boxes: Box[];
  bands: Band[];
  width: number;
  height: number;
}

const NAMES = ["forward", "backward", "weight half", "gradients", "update"];
const LANES: Record<string, number> = { F: 0, B: 1, BI: 1, BW: 2 };

export function layoutOf(graph: TaskGraph): GraphLayout {
  const { nodes } = graph;
  const [before, after] = neighbours(graph);
  const order = topological(nodes.length, before, after);
  const lanes = lanesOf(nodes, order, after);
  const columns = columnsOf(nodes, order, lanes, before);
  const stacks = new Map<string, number>();
  const rows = nodes.map((_, i) => {
    const key = `${lanes[i]}:${columns[i]}`;
    const row = stacks.get(key) ?? 0;
    stacks.set(key, row + 1);
    return row;
  });
  const bands: Band[] = [];
  const tops: number[] = [];
  let y = 0;
  NAMES.forEach((name, lane) => {
    const most = Math.max(-1, ...nodes.map((_, i) => (lanes[i] === lane ? rows[i] : -1))) + 1;
    tops[lane] = y + LANE;
    if (!most) return;
    const height = LANE + most * ROW + 8;
    bands.push({ name, y, height });
    y += height;
  });
  const boxes = nodes.map((_, i) => ({ x: columns[i] * COLUMN + 24, y: tops[lanes[i]] + rows[i] * ROW }));
  const width = Math.max(0, ...columns) * COLUMN + WIDE + 48;
  return { boxes, bands, width, height: y };
}

function neighbours(graph: TaskGraph): [number[][], number[][]] {
  const before: number[][] = graph.nodes.map(() => []);
  const after: number[][] = graph.nodes.map(() => []);
  for (const [source, target] of graph.edges) {
    before[target].push(source);
    after[source].push(target);
  }
  return [before, after];
}

/** Sources first. Sums of several microbatches may feed each other in turn: such a ring is cut where the
 * fewest sources are missing. */
function topological(num: number, before: number[][], after: number[][]): number[] {
  const left = before.map((list) => list.length);
  const order: number[] = [];
  const placed = new Uint8Array(num);
  const ready = left.flatMap((missing, i) => (missing ? [] : [i]));
  while (order.length < num) {
    const node = ready.shift() ?? leastMissing(left, placed);
    if (placed[node]) continue;
    placed[node] = 1;
    order.push(node);
    for (const next of after[node]) if (--left[next] === 0) ready.push(next);
  }
  return order;
}

function leastMissing(left: number[], placed: Uint8Array): number {
  let best = -1;
  for (let i = 0; i < left.length; i++)
    if (!placed[i] && (best < 0 || left[i] < left[best])) best = i;
  return best;
}

/** A chunk's lane is that of its phase; what is between chunks goes with the first that reads it. */
function lanesOf(nodes: GraphNode[], order: number[], after: number[][]): number[] {
  const lanes = nodes.map((node) => LANES[node.phase] ?? -1);
  for (const i of [...order].reverse()) {
    if (lanes[i] >= 0) continue;
    const found = after[i].map((next) => lanes[next]).filter((lane) => lane >= 0 && lane < 3);
    if (found.length) lanes[i] = Math.min(...found);
    else lanes[i] = ["update", "settle", "all_gather"].includes(nodes[i].kind) ? 4 : 3;
  }
  return lanes;
}

function columnsOf(nodes: GraphNode[], order: number[], lanes: number[], before: number[][]): number[] {
  const columns = nodes.map(() => 0);
  const forwards = new Map<string, number>();
  for (const i of order) {
    if (lanes[i] !== 0) continue;
    const sources = before[i].filter((source) => lanes[source] === 0);
    columns[i] = Math.max(-1, ...sources.map((source) => columns[source])) + 1;
    if (nodes[i].phase) forwards.set(region(nodes[i]), columns[i]);
  }
  const firstColumns = new Map<string, number>(); // of each class
  nodes.forEach(({ phase, at }, i) => {
    if (phase === "F") firstColumns.set(at, Math.min(firstColumns.get(at) ?? Infinity, columns[i]));
  });
  const placed = new Set<number>();
  nodes.forEach((node, i) => {
    const twin = node.phase ? forwards.get(region(node)) : undefined;
    if (lanes[i] !== 0 && twin !== undefined) columns[i] = twin;
    if (lanes[i] === 0 || twin !== undefined) placed.add(i);
  });
  for (const i of order) {
    if (placed.has(i)) continue;
    const known = before[i].filter((source) => placed.has(source));
    const backward = known.filter((source) => lanes[source] > 0);
    const near = backward.length ? backward : known;
    if (near.length) {
      const least = Math.min(...near.map((source) => columns[source]));
      columns[i] = Math.max(0, lanes[i] < 3 ? least - 1 : least);
    } else columns[i] = firstColumns.get(nodes[i].at) ?? 0;
    placed.add(i);
  }
  return columns;
}

/** What a forward and its backward have in common: `[PP=2.1]`. */
function region(node: GraphNode): string {
  return node.name.slice(node.phase.length);
}
