// Numbers in; short texts out.

const SIZES = ["B", "KiB", "MiB", "GiB", "TiB"];

/** `25.0 MiB`. */
export function bytes(size: number): string {
  if (size < 1024) return size > 0 && size < 1 ? "under 1 B" : `${Math.round(size)} B`;
  const power = Math.min(Math.floor(Math.log(size) / Math.log(1024)), 4);
  return `${(size / 1024 ** power).toFixed(1)} ${SIZES[power]}`;
}

/** Milliseconds: `12.3 ms`, `1.25 s`, `8.1 µs`. */
export function duration(ms: number): string {
  const size = Math.abs(ms);
  if (size >= 999.5) return `${digits(ms / 1e3)} s`;
  if (size >= 0.9995) return `${digits(ms)} ms`;
  if (size >= 0.0009995) return `${digits(ms * 1e3)} µs`;
  return size ? `${digits(ms * 1e6)} ns` : "0 ms";
}

/** Three digits, and more of a large number. */
export function digits(value: number): string {
  const size = Math.abs(value);
  if (size >= 100) return value.toFixed(0);
  return Number(value.toPrecision(3)).toString();
}

export function percent(share: number): string {
  const value = share * 100;
  return `${value < 9.95 ? value.toFixed(1) : value.toFixed(0)} %`;
}

export function count(value: number): string {
  return value.toLocaleString("en-US");
}

export function plural(num: number, word: string): string {
  return `${count(num)} ${word}${num === 1 ? "" : "s"}`;
}
