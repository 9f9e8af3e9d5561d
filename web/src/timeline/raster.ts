// Spans of a lane in; one line of pixels, each in the colour of what takes most of it, out.
import type { Track } from "../data/track";
import type { Lane } from "./lanes";
import { firstAfter } from "./lanes";
import { mix } from "./palette";

const LEAST = 0.5; // of a pixel's colour, however short its spans are
const GAP = 3; // pixels, from which on neighbours are kept apart

export interface Window {
  begin: number;
  end: number;
  /** Pixels per millisecond. */
  scale: number;
}

export class Raster {
  private covered: Float32Array;
  private longest: Float32Array;
  private color: Uint32Array;

  constructor(readonly width: number) {
    this.covered = new Float32Array(width);
    this.longest = new Float32Array(width);
    this.color = new Uint32Array(width);
  }

  /** `colors` are by label; spans whose flag is not set are drawn in `others` instead, where there are flags. */
  draw(
    line: Uint32Array,
    lane: Lane,
    track: Track,
    window: Window,
    colors: Uint32Array,
    flags: Uint8Array | null,
    others: (style: number) => number,
  ): void {
    const { covered, longest, color, width } = this;
    covered.fill(0);
    longest.fill(0);
    const { spans } = lane;
    const { start, end, which, labels } = track;
    const { begin, scale } = window;
    for (let i = firstAfter(lane, track, begin); i < spans.length; i++) {
      const span = spans[i];
      if (start[span] >= window.end) break;
      let from = (start[span] - begin) * scale;
      let to = (end[span] - begin) * scale;
      if (from < 0) from = 0;
      if (to > width) to = width;
      if (to - from > GAP) to -= 1;
      const label = which[span];
      const own = flags && !flags[span] ? others(labels.style[label]) : colors[label];
      const first = from | 0;
      const last = to | 0;
      if (first === last) {
        const share = to - from;
        covered[first] += share;
        if (share >= longest[first]) {
          longest[first] = share;
          color[first] = own;
        }
        continue;
      }
      const head = first + 1 - from;
      covered[first] += head;
      if (head >= longest[first]) {
        longest[first] = head;
        color[first] = own;
      }
      if (last > first + 1) {
        covered.fill(1, first + 1, last);
        longest.fill(1, first + 1, last);
        color.fill(own, first + 1, last);
      }
      if (last < width) {
        const tail = to - last;
        covered[last] += tail;
        if (tail > longest[last]) {
          longest[last] = tail;
          color[last] = own;
        }
      }
    }
    for (let x = 0; x < width; x++) {
      const share = covered[x];
      if (share > 0.98) line[x] = color[x];
      else if (share > 0) line[x] = mix(line[x], color[x], share < LEAST ? LEAST : share);
    }
  }
}
