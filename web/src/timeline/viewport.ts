// The window of time that is shown, and how it moves.

const ROOM = 0.02; // of the step, left and right of it
const CLOSEST = 1e-5; // milliseconds

export class Viewport {
  begin: number;
  end: number;
  private readonly first: number;
  private readonly last: number;
  private goal: { begin: number; end: number; since: number; from: { begin: number; end: number } } | null =
    null;

  constructor(length: number) {
    const room = (length || 1) * ROOM;
    this.first = -room;
    this.last = (length || 1) + room;
    this.begin = this.first;
    this.end = this.last;
  }

  get length(): number {
    return this.end - this.begin;
  }

  get whole(): { begin: number; end: number } {
    return { begin: this.first, end: this.last };
  }

  /** A factor below 1 shows less time; what is at `time` stays where it is. */
  zoom(time: number, factor: number): void {
    const length = Math.min(Math.max(this.length * factor, CLOSEST), this.last - this.first);
    const share = (time - this.begin) / this.length;
    this.set(time - share * length, time - share * length + length);
  }

  pan(by: number): void {
    this.set(this.begin + by, this.end + by);
  }

  set(begin: number, end: number): void {
    const length = Math.min(end - begin, this.last - this.first);
    this.begin = Math.min(Math.max(begin, this.first), this.last - length);
    this.end = this.begin + length;
    this.goal = null;
  }

  /** Go there within some frames; `advance` moves on. */
  glide(begin: number, end: number): void {
    const now = { begin: this.begin, end: this.end };
    this.goal = { begin, end, since: performance.now(), from: now };
  }

  /** Whether there is further to go. */
  advance(): boolean {
    const { goal } = this;
    if (!goal) return false;
    const share = Math.min(1, (performance.now() - goal.since) / 180);
    const eased = 1 - (1 - share) ** 3;
    const between = (a: number, b: number): number => a + (b - a) * eased;
    this.set(between(goal.from.begin, goal.begin), between(goal.from.end, goal.end));
    this.goal = share < 1 ? goal : null;
    return share < 1;
  }
}
