// Feed: the server's events in, as they come; a training that knows them out. A connection that is lost is
// tried again, later each time; not after the training has ended.
import { inflate } from "../data/block";
import { Report } from "../data/report";
import { Listeners } from "../listeners";
import type { Event, Training } from "./training";

const FIRST = 1; // seconds
const LONGEST = 30;

export class Feed {
  /** Seconds until it is tried again; null while it is there. */
  lost: number | null = null;
  readonly changed = new Listeners<[]>();
  private pause = FIRST;

  constructor(private readonly training: Training) {
    this.connect();
  }

  private connect(): void {
    const source = new EventSource("events");
    source.onmessage = ({ data }: MessageEvent<string>) => {
      this.pause = FIRST;
      this.tell(null);
      this.training.take(JSON.parse(data) as Event[]);
      if (this.training.over) source.close();
    };
    source.onerror = () => {
      source.close();
      if (this.training.over) return;
      this.tell(this.pause);
      setTimeout(() => this.connect(), this.pause * 1e3);
      this.pause = Math.min(this.pause * 2, LONGEST);
    };
  }

  private tell(lost: number | null): void {
    if (this.lost === lost) return;
    this.lost = lost;
    this.changed.tell();
  }

  /** The number and the report of the step that was recorded last; null without one, as at the end. */
  async latest(): Promise<[number, Report] | null> {
    const answer = await fetch("step");
    if (answer.status !== 200) return null;
    return [Number(answer.headers.get("Piper-Step")), new Report(await inflate(await answer.arrayBuffer()))];
  }
}
