// Scale: the numbers of a chart and its height in; where a number stands, and the lines of its axis, out.
import { niceStep } from "../timeline/axis";

export interface Marks {
  values: number[];
  text: (value: number) => string;
}

export class Scale {
  constructor(
    private readonly low: number,
    private readonly high: number,
    private readonly top: number,
    private readonly bottom: number,
    readonly log: boolean,
  ) {}

  /** Of numbers, with some room; from 0 on, if that is where they are measured from. */
  static of(values: number[], fromZero: boolean, log: boolean, top: number, bottom: number): Scale {
    let [low, high] = [Infinity, -Infinity];
    for (const value of values)
      if (Number.isFinite(value) && (!log || value > 0)) [low, high] = [Math.min(low, value), Math.max(high, value)];
    if (low > high) [low, high] = [log ? 0.1 : 0, 1];
    if (log) return new Scale(low / 1.08, high * 1.08, top, bottom, true);
    if (fromZero) [low, high] = [Math.min(0, low), Math.max(0, high * 1.12)];
    const room = (high - low || Math.abs(high) || 1) * (fromZero ? 0 : 0.07);
    return new Scale(low - room, (high > low ? high : low + 1) + room, top, bottom, false);
  }

  y(value: number): number {
    const share = this.log
      ? Math.log(value / this.low) / Math.log(this.high / this.low)
      : (value - this.low) / (this.high - this.low);
    return this.bottom - share * (this.bottom - this.top);
  }

  /** A line for each `apart` pixels or so; `unit` is what round numbers are of. */
  lines(apart: number, unit: number): number[] {
    const num = Math.max(1, Math.floor((this.bottom - this.top) / apart));
    if (this.log) return this.powers(num);
    const step = niceStep((this.high - this.low) / unit / num) * unit;
    const found: number[] = [];
    for (let i = Math.ceil(this.low / step); i * step <= this.high; i++) found.push(i * step);
    return found;
  }

  private powers(num: number): number[] {
    const found: number[] = [];
    for (let power = Math.floor(Math.log10(this.low)); power <= Math.log10(this.high); power++)
      for (const factor of [1, 1.5, 2, 3, 5, 7])
        if (factor * 10 ** power >= this.low && factor * 10 ** power <= this.high) found.push(factor * 10 ** power);
    const every = Math.ceil(found.length / (num + 1));
    return found.filter((_, number) => number % every === 0);
  }
}
