// Keys of the whole page.
import type { Explorer } from "./explorer";
import type { Page } from "./page";
import { focus, visit } from "./timeline/input";

export class Keys {
  constructor(private readonly page: Page) {}

  listen(): void {
    addEventListener("keydown", (event) => {
      if (this.page.help.element.open && event.key !== "?") return;
      if (this.down(event)) event.preventDefault();
    });
    addEventListener("keyup", (event) => this.page.explorer?.release(event.key));
    addEventListener("blur", () => this.page.explorer?.release()); // another window hears them come up
  }

  private down(event: KeyboardEvent): boolean {
    const { store, explorer, tabs, help } = this.page;
    const { tab } = store.state;
    if (event.ctrlKey || event.metaKey || event.altKey) return false;
    const place = /^[1-9]$/.test(event.key) ? Number(event.key) - 1 : tabs.length;
    if (place < tabs.length) store.set({ tab: tabs[place][0] });
    else if (event.key === "?") help.toggle();
    else if (event.key === "/" && tab === "timeline") explorer?.search.focus();
    else if (event.key === "Escape")
      store.set({ selection: null, microbatch: null, pinned: false, directive: null });
    else if (tab === "graph") return explorer?.graph?.key(event.key.toLowerCase()) ?? false;
    else if (explorer && (tab === "timeline" || tab === "memory")) return this.inPicture(event, tab, explorer);
    else return false;
    return true;
  }

  private inPicture(event: KeyboardEvent, tab: "timeline" | "memory", explorer: Explorer): boolean {
    const { store } = this.page;
    const { state } = store;
    if (explorer.inputs[tab].press(event.key)) return true;
    switch (event.key.toLowerCase()) {
      case "f":
        focus(explorer.pictures[tab], store);
        return true;
      case "p":
        store.set({ path: !state.path, microbatch: null, pinned: false });
        return true;
      case "m":
        store.set(state.pinned ? { pinned: false, microbatch: null } : { pinned: state.microbatch !== null });
        return true;
      case "arrowleft":
        return this.beside(-1, explorer);
      case "arrowright":
        return this.beside(1, explorer);
      default:
        return false;
    }
  }

  /** The span before or after the chosen one in its lane. */
  private beside(by: number, explorer: Explorer): boolean {
    const { store } = this.page;
    const { selection, tab } = store.state;
    const picture = explorer.pictures.timeline;
    if (selection?.kind !== "span" || tab !== "timeline") return false;
    const { timeline, place } = selection;
    const lane = picture.laneOf(timeline, place.track, place.span);
    const span = lane?.spans[lane.spans.indexOf(place.span) + by];
    if (span !== undefined) visit(picture, store, timeline, { track: place.track, span });
    return true;
  }
}
