// Colours as numbers: per label of a list, in full or stepped back, for what stands out at the moment.
import type { Labels } from "../data/labels";
import type { StyleRow } from "../data/schema";
import type { Surface } from "../ui/theme";

/** A web colour as a pixel of an ImageData. */
export function pixel(color: string): number {
  const value = parseInt(color.slice(1), 16);
  const [red, green, blue] = [(value >> 16) & 255, (value >> 8) & 255, value & 255];
  return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}

/** So much of `over` on `under`. */
export function mix(under: number, over: number, share: number): number {
  const part = (share * 256) | 0;
  const rest = 256 - part;
  const odd = ((over & 0xff00ff) * part + (under & 0xff00ff) * rest) >>> 8;
  const even = ((over >>> 8) & 0xff) * part + ((under >>> 8) & 0xff) * rest;
  return ((255 << 24) | (odd & 0xff00ff) | (even & 0xff00)) >>> 0;
}

const STEPPED_BACK = 0.16;

export interface Emphasis {
  microbatch: number | null;
  directive: number | null;
}

export class Palette {
  private readonly full: Uint32Array;
  private readonly back: Uint32Array;
  private readonly lists = new Map<Labels, Uint32Array>();

  constructor(
    styles: StyleRow[],
    surface: Surface,
    private readonly emphasis: Emphasis,
  ) {
    this.full = Uint32Array.from(styles, (style) => pixel(style.color));
    const lane = pixel(surface.lane);
    this.back = this.full.map((color) => mix(lane, color, STEPPED_BACK));
  }

  /** Whether a label stands out, or nothing does. */
  shows(labels: Labels, label: number): boolean {
    const { microbatch, directive } = this.emphasis;
    if (microbatch !== null && labels.microbatch[label] !== microbatch) return false;
    return directive === null || labels.origin[label] === directive;
  }

  colors(labels: Labels): Uint32Array {
    const known = this.lists.get(labels);
    if (known) return known;
    const found = new Uint32Array(labels.length);
    for (let label = 0; label < found.length; label++) {
      const table = this.shows(labels, label) ? this.full : this.back;
      found[label] = table[labels.style[label]];
    }
    this.lists.set(labels, found);
    return found;
  }

  steppedBack(style: number): number {
    return this.back[style];
  }
}
