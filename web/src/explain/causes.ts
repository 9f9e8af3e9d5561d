// What a span waited for last, on its own rank (src/piper/insight/causes.py).
import type { RankClass } from "../data/classes";
import type { Place } from "../data/meetings";
import { samePlace } from "../data/meetings";
import type { Timeline } from "../data/report";
import type { Why } from "../data/schema";

export interface Cause {
  place: Place | null;
  at: number;
  why: Why;
}

export class Causes {
  private last_: Place | null = null;

  constructor(
    readonly timeline: Timeline,
    private readonly classes: RankClass[],
  ) {}

  get known(): boolean {
    return this.timeline.tracks.every((track) => track.cause !== null);
  }

  cause({ track: number, span }: Place): Cause {
    const track = this.timeline.tracks[number];
    const before = track.cause![span];
    const why = this.timeline.whys[track.why![span]];
    if (before < 0) return { place: null, at: 0, why };
    const place = { track: number, span: before };
    if (why !== "host") return { place, at: track.end[before], why };
    if (!this.timeline.hostComputes) return { place, at: track.issued[span], why };
    return { place, at: track.talks(before) ? track.issued[before] : track.end[before], why };
  }

  /** The last task, up to one, that its host waited for. */
  readBefore({ track, span }: Place): Place | null {
    const { part, which } = this.timeline.tracks[track];
    const tasks = this.classes[part];
    for (let i = span; i >= 0; i--) if (tasks?.blocks(which[i])) return { track, span: i };
    return null;
  }

  /** The span that ends last. */
  get last(): Place {
    if (this.last_) return this.last_;
    let found: Place = { track: 0, span: 0 };
    let at = -Infinity;
    this.timeline.tracks.forEach((track, number) => {
      for (let span = 0; span < track.num; span++)
        if (track.end[span] > at) [found, at] = [{ track: number, span }, track.end[span]];
    });
    this.last_ = found;
    return found;
  }

  /** Those whose start waited for this one last, and members of its communication that it kept waiting. */
  followers(place: Place): { place: Place; why: Why }[] {
    const track = this.timeline.tracks[place.track];
    const found: { place: Place; why: Why }[] = [];
    for (let span = 0; span < track.num; span++)
      if (track.cause![span] === place.span)
        found.push({ place: { track: place.track, span }, why: this.timeline.whys[track.why![span]] });
    const { meetings } = this.timeline;
    if (samePlace(meetings.lastToCome(place), place))
      for (const other of meetings.members(place))
        if (other.track !== place.track) found.push({ place: other, why: "peer" });
    return found;
  }
}
