// Numbers of a training in; short texts out.
import { digits } from "../ui/format";

/** `12.5k`. */
export function rate(value: number): string {
  for (const [size, letter] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]] as const)
    if (value >= size) return `${digits(value / size)}${letter}`;
  return digits(value);
}

/** Four digits that matter: `2.530`, `0.0812`, `3.1e-5`. */
export function number(value: number): string {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1e-3 || size >= 1e6) return value.toExponential(2);
  return size >= 1000 ? value.toFixed(0) : value.toPrecision(4);
}

/** Seconds as `0:41`, or `2:03:10`. */
export function clock(seconds: number): string {
  const whole = Math.max(0, Math.round(seconds));
  const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  const two = (value: number): string => String(value).padStart(2, "0");
  return hours ? `${hours}:${two(minutes)}:${two(rest)}` : `${minutes}:${two(rest)}`;
}

/** Seconds since 1970 as a time of the day. */
export function timeOfDay(at: number): string {
  return new Date(at * 1e3).toLocaleTimeString("en-GB");
}
