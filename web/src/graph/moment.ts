// The graph after so many directives: which nodes are there, and what they are by then.
import type { DirectiveRow, GraphNode, TaskGraph } from "../data/schema";

const HALVES = ["BI", "BW"];

export class Moment {
  private readonly split: boolean;
  private readonly halved: boolean;
  private readonly whole = new Map<string, number>(); // backwards that are not in halves, by region
  private readonly inputs = new Map<string, number>(); // input halves, likewise
  private edges_: [number, number][] | null = null;

  constructor(
    private readonly graph: TaskGraph,
    directives: DirectiveRow[],
    /** The last directive that has been applied; -1 for none. */
    readonly upto: number,
  ) {
    const is = (name: string, row: DirectiveRow): boolean => row.name === name && row.added > 0;
    this.split = !directives.some((row, i) => is("split", row) && i > upto);
    this.halved = !directives.some((row, i) => is("order", row) && i > upto);
    graph.nodes.forEach((node, i) => {
      if (node.phase === "B") this.whole.set(place(node), i);
      if (node.phase === "BI") this.inputs.set(place(node), i);
    });
  }

  /** Chunks are there from the start, but halves of backwards only once an order names them. */
  has(number: number): boolean {
    const node = this.graph.nodes[number];
    if (!node.phase) return node.origin <= this.upto;
    if (this.halved || !HALVES.includes(node.phase)) return true;
    return node.phase === "BI" && !this.whole.has(place(node));
  }

  /** Pairs of nodes that are there: what flows through nodes that are yet to come flows directly. */
  get edges(): [number, number][] {
    this.edges_ ??= this.between();
    return this.edges_;
  }

  private between(): [number, number][] {
    const after = new Map<number, Set<number>>();
    for (const [source, target] of this.graph.edges) {
      const from = this.standIn(source);
      if (!after.has(from)) after.set(from, new Set());
      after.get(from)!.add(this.standIn(target));
    }
    const found: [number, number][] = [];
    for (const source of after.keys()) {
      if (!this.has(source)) continue;
      const seen = new Set<number>();
      const next = [...after.get(source)!];
      while (next.length) {
        const node = next.pop()!;
        if (seen.has(node)) continue;
        seen.add(node);
        if (!this.has(node)) next.push(...(after.get(node) ?? []));
        else if (node !== source) found.push([source, node]);
      }
    }
    return found;
  }

  /** Halves of a backward that is still whole are that backward. */
  private standIn(number: number): number {
    const node = this.graph.nodes[number];
    if (this.halved || !HALVES.includes(node.phase)) return number;
    return this.whole.get(place(node)) ?? this.inputs.get(place(node)) ?? number;
  }

  private isWhole(node: GraphNode): boolean {
    return !this.halved && node.phase === "BI";
  }

  name(number: number): string {
    const node = this.graph.nodes[number];
    return this.isWhole(node) ? `B${node.name.slice(node.phase.length)}` : node.name;
  }

  style(number: number): string {
    const node = this.graph.nodes[number];
    return this.isWhole(node) ? "B" : node.style;
  }

  /** How many a step on each rank: one for each microbatch that there is by then. */
  num(number: number): number {
    const node = this.graph.nodes[number];
    if (!this.split) return 1;
    if (this.halved || node.phase !== "B") return node.num;
    const half = this.graph.nodes.find((other) => other.phase === "BI" && place(other) === place(node));
    return node.num + (half?.num ?? 0);
  }

  placed(number: number): boolean {
    return this.graph.nodes[number].origin <= this.upto;
  }
}

/** Where a chunk stands in the model. */
function place(node: GraphNode): string {
  return `${node.at} ${node.name.slice(node.phase.length)}`;
}
