// Ticks of a window of time.

export interface Tick {
  time: number;
  text: string;
}

const UNITS: [number, string][] = [
  [1000, "s"],
  [1, "ms"],
  [1e-3, "µs"],
  [1e-6, "ns"],
];

/** About `num` of them, at 1, 2 or 5 times a power of ten. */
export function ticks(begin: number, end: number, num: number, unit: string): Tick[] {
  const step = niceStep((end - begin) / Math.max(num, 1));
  const [size, name] = unit === "s" ? unitOf(step) : [1, unit];
  const places = Math.max(0, -Math.floor(Math.log10(step / size) + 1e-9));
  const found: Tick[] = [];
  for (let i = Math.ceil(begin / step); i * step <= end; i++) {
    const time = i * step;
    found.push({ time, text: `${(time / size).toFixed(places)} ${name}`.trim() });
  }
  return found;
}

/** The next of 1, 2, 5, 10, 20, ... */
export function niceStep(least: number): number {
  const power = 10 ** Math.floor(Math.log10(least));
  const factor = [1, 2, 5, 10].find((factor) => factor * power >= least) ?? 10;
  return factor * power;
}

function unitOf(step: number): [number, string] {
  return UNITS.find(([size]) => step >= size * 0.999) ?? UNITS[UNITS.length - 1];
}
