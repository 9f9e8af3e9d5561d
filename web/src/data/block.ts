// The block of a page in; its head and its columns, out.
import type { Head, Ragged, Ref } from "./schema";

export type Numbers =
  | Int8Array
  | Uint8Array
  | Int16Array
  | Uint16Array
  | Int32Array
  | Uint32Array
  | Float64Array;

const KINDS = {
  b: Int8Array,
  B: Uint8Array,
  h: Int16Array,
  H: Uint16Array,
  i: Int32Array,
  I: Uint32Array,
  d: Float64Array,
} as const;

/** Rows of different lengths: row i is values[starts[i]] up to values[starts[i + 1]]. */
export class Rows {
  private readonly starts: Uint32Array;

  constructor(
    lengths: Numbers,
    private readonly values: Numbers,
  ) {
    this.starts = new Uint32Array(lengths.length + 1);
    for (let i = 0; i < lengths.length; i++) this.starts[i + 1] = this.starts[i] + lengths[i];
  }

  get length(): number {
    return this.starts.length - 1;
  }

  row(index: number): number[] {
    return Array.from(this.values.subarray(this.starts[index], this.starts[index + 1]));
  }
}

export class Block {
  readonly head: Head;
  private readonly base: number;

  constructor(private readonly data: ArrayBuffer) {
    const length = new DataView(data).getUint32(0, true);
    this.base = 4 + length;
    this.head = JSON.parse(new TextDecoder().decode(new Uint8Array(data, 4, length))) as Head;
  }

  numbers([kind, at, length]: Ref): Numbers {
    const type = KINDS[kind as keyof typeof KINDS];
    return new type(this.data, this.base + at, length);
  }

  rows([lengths, values]: Ragged): Rows {
    return new Rows(this.numbers(lengths), this.numbers(values));
  }
}

/** Of a page: deflated, in base 64. */
export function unpack(text: string): Promise<Block> {
  const letters = atob(text.trim());
  const packed = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) packed[i] = letters.charCodeAt(i);
  return inflate(packed.buffer);
}

export async function inflate(packed: ArrayBuffer): Promise<Block> {
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Block(await new Response(stream).arrayBuffer());
}
