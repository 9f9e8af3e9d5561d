// Curve: numbers of steps in; at most so many points, each the mean of as many steps, out.

const MOST = 8192;
export type Point = [step: number, value: number | null];

export class Curve {
  readonly steps: number[] = [];
  /** NaN where there is no number. */
  readonly values: number[] = [];

  constructor(points: Point[] = []) {
    for (const point of points) this.add(...point);
  }

  get length(): number {
    return this.steps.length;
  }

  /** Of the last step that has a number. */
  get last(): number | null {
    for (let i = this.length - 1; i >= 0; i--) if (!Number.isNaN(this.values[i])) return this.values[i];
    return null;
  }

  /** As points grow too many, every two old ones become one. */
  add(step: number, value: number | null): void {
    this.steps.push(step);
    this.values.push(value ?? NaN);
    if (this.length < MOST) return;
    const half = MOST / 2;
    for (let i = 0; i < half; i++) {
      this.steps[i] = this.steps[2 * i + 1];
      this.values[i] = mean(this.values[2 * i], this.values[2 * i + 1]);
    }
    this.steps.length = this.values.length = half;
  }

  /** The place of the point nearest to a step. */
  near(step: number): number {
    let [low, high] = [0, this.length - 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.steps[middle] < step) low = middle + 1;
      else high = middle;
    }
    return low > 0 && step - this.steps[low - 1] < this.steps[low] - step ? low - 1 : low;
  }

  /** Each number as the mean of those around it, as many before as after: noise goes, and nothing lags. */
  smooth(most: number): number[] {
    const [sums, nums] = [new Float64Array(this.length + 1), new Uint32Array(this.length + 1)];
    this.values.forEach((value, i) => {
      const known = !Number.isNaN(value);
      sums[i + 1] = sums[i] + (known ? value : 0);
      nums[i + 1] = nums[i] + Number(known);
    });
    return this.values.map((_, i) => {
      const around = Math.min(most, i, this.length - 1 - i);
      const [from, to] = [i - around, i + around + 1];
      return (sums[to] - sums[from]) / (nums[to] - nums[from]);
    });
  }
}

function mean(one: number, other: number): number {
  if (Number.isNaN(one)) return other;
  return Number.isNaN(other) ? one : (one + other) / 2;
}
