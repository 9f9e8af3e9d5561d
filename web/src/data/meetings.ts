// Who takes part in each communication of a step, who came last, and when it was over.
import type { Track } from "./track";

export interface Place {
  track: number;
  span: number;
}

export function samePlace(one: Place, other: Place): boolean {
  return one.track === other.track && one.span === other.span;
}

export class Meetings {
  private readonly all = new Map<number, Place[]>();

  constructor(
    private readonly tracks: Track[],
    private readonly hostComputes: boolean,
  ) {
    tracks.forEach((track, number) => {
      for (let span = 0; span < track.num; span++) {
        const meeting = track.meeting[span];
        if (meeting < 0) continue;
        const known = this.all.get(meeting);
        if (known) known.push({ track: number, span });
        else this.all.set(meeting, [{ track: number, span }]);
      }
    });
  }

  /** All spans of a communication; of a computation, itself. */
  members(place: Place): Place[] {
    return this.all.get(this.tracks[place.track].meeting[place.span]) ?? [place];
  }

  /** When a span was ready on its own rank. */
  came({ track: number, span }: Place): number {
    const track = this.tracks[number];
    if (!this.hostComputes) return track.start[span];
    return Math.max(track.start[span], Math.min(track.issued[span], track.end[span]));
  }

  lastToCome(place: Place): Place {
    let last = place;
    let at = -Infinity;
    for (const member of this.members(place)) {
      const came = this.came(member);
      if (came > at) [last, at] = [member, came];
    }
    return last;
  }

  /** When a span could go on: for a communication, when all its members were there. */
  began(place: Place): number {
    return this.came(this.lastToCome(place));
  }
}
