// Keys of the whole page.
import type { GraphView } from "./graph/view";
import type { Store, Tab } from "./state";
import type { Input } from "./timeline/input";
import { focus, visit } from "./timeline/input";
import type { Picture } from "./timeline/picture";
import type { Help } from "./ui/help";
import type { Search } from "./ui/search";

const TABS: Tab[] = ["timeline", "memory", "communication", "graph"];
type Two<T> = { timeline: T; memory: T };

export class Keys {
  constructor(
    private readonly store: Store,
    private readonly pictures: Two<Picture>,
    private readonly inputs: Two<Input>,
    private readonly graph: GraphView | null,
    private readonly help: Help,
    private readonly search: Search,
  ) {}

  listen(): void {
    addEventListener("keydown", (event) => {
      if (this.help.element.open && event.key !== "?") return;
      if (this.down(event)) event.preventDefault();
    });
    addEventListener("keyup", (event) => {
      this.inputs.timeline.key(event, false);
      this.inputs.memory.key(event, false);
    });
  }

  private down(event: KeyboardEvent): boolean {
    const { store } = this;
    const { tab } = store.state;
    if (event.ctrlKey || event.metaKey || event.altKey) return false;
    const place = "1234".indexOf(event.key);
    if (place >= 0 && event.key.length === 1) store.set({ tab: TABS[place] });
    else if (event.key === "?") this.help.toggle();
    else if (event.key === "/" && tab === "timeline") this.search.focus();
    else if (event.key === "Escape")
      store.set({ selection: null, microbatch: null, pinned: false, directive: null });
    else if (tab === "graph") return this.graph?.key(event.key.toLowerCase()) ?? false;
    else if (tab === "timeline" || tab === "memory") return this.inPicture(event, tab);
    else return false;
    return true;
  }

  private inPicture(event: KeyboardEvent, tab: "timeline" | "memory"): boolean {
    const { store } = this;
    const { state } = store;
    if (this.inputs[tab].key(event, true)) return true;
    switch (event.key.toLowerCase()) {
      case "f":
        focus(this.pictures[tab], store);
        return true;
      case "p":
        store.set({ path: !state.path, microbatch: null, pinned: false });
        return true;
      case "m":
        store.set(state.pinned ? { pinned: false, microbatch: null } : { pinned: state.microbatch !== null });
        return true;
      case "arrowleft":
        return this.beside(-1);
      case "arrowright":
        return this.beside(1);
      default:
        return false;
    }
  }

  /** The span before or after the chosen one in its lane. */
  private beside(by: number): boolean {
    const { selection } = this.store.state;
    const picture = this.pictures.timeline;
    if (selection?.kind !== "span" || this.store.state.tab !== "timeline") return false;
    const { timeline, place } = selection;
    const lane = picture.laneOf(timeline, place.track, place.span);
    const span = lane?.spans[lane.spans.indexOf(place.span) + by];
    if (span !== undefined) visit(picture, this.store, timeline, { track: place.track, span });
    return true;
  }
}
