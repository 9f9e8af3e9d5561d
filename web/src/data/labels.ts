// What spans are of: one list for all tracks of a class.
import type { Block, Numbers } from "./block";
import type { LabelRefs } from "./schema";

export class Labels {
  readonly style: Numbers;
  readonly microbatch: Numbers;
  readonly origin: Numbers;
  readonly nbytes: Numbers;
  readonly talks: Numbers;
  readonly receives: Numbers;
  private readonly texts: Record<"name" | "short" | "kind" | "stream" | "phase", Numbers>;

  constructor(
    block: Block,
    refs: LabelRefs,
    private readonly strings: string[],
  ) {
    this.texts = {
      name: block.numbers(refs.name),
      short: block.numbers(refs.short),
      kind: block.numbers(refs.kind),
      stream: block.numbers(refs.stream),
      phase: block.numbers(refs.phase),
    };
    this.style = block.numbers(refs.style);
    this.microbatch = block.numbers(refs.microbatch);
    this.origin = block.numbers(refs.origin);
    this.nbytes = block.numbers(refs.nbytes);
    this.talks = block.numbers(refs.talks);
    this.receives = block.numbers(refs.receives);
  }

  get length(): number {
    return this.style.length;
  }

  name(label: number): string {
    return this.strings[this.texts.name[label]];
  }

  short(label: number): string {
    return this.strings[this.texts.short[label]];
  }

  kind(label: number): string {
    return this.strings[this.texts.kind[label]];
  }

  stream(label: number): string {
    return this.strings[this.texts.stream[label]];
  }

  phase(label: number): string {
    return this.strings[this.texts.phase[label]];
  }
}
