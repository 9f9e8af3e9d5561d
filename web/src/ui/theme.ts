// Light or dark: as the system says, unless the switch was used.
import { Listeners } from "../listeners";

export type Theme = "light" | "dark";

export interface Surface {
  page: string;
  lane: string;
  laneOdd: string;
  grid: string;
  text: string;
  muted: string;
  faint: string;
  line: string;
  accent: string;
  evaluation: string;
  path: string;
  pair: string;
}

const SURFACES: Record<Theme, Surface> = {
  light: {
    page: "#ffffff",
    lane: "#f6f7f9",
    laneOdd: "#eff1f4",
    grid: "#e2e5ea",
    text: "#1a2029",
    muted: "#5b6573",
    faint: "#8b95a3",
    line: "#d9dde3",
    accent: "#2563eb",
    evaluation: "#d4690f",
    path: "#c81e3a",
    pair: "#7c4fc4",
  },
  dark: {
    page: "#12161c",
    lane: "#191e26",
    laneOdd: "#1d232c",
    grid: "#282f3a",
    text: "#e6e9ee",
    muted: "#9aa5b4",
    faint: "#6d7888",
    line: "#2c3440",
    accent: "#6ea2ff",
    evaluation: "#f5a54a",
    path: "#ff6b81",
    pair: "#c3a1f2",
  },
};

export class Themes {
  private readonly system = matchMedia("(prefers-color-scheme: dark)");
  private chosen: Theme | null = null;
  readonly listeners = new Listeners<[]>();

  constructor() {
    this.system.addEventListener("change", () => this.apply());
    this.apply();
  }

  get theme(): Theme {
    return this.chosen ?? (this.system.matches ? "dark" : "light");
  }

  get surface(): Surface {
    return SURFACES[this.theme];
  }

  toggle(): void {
    this.chosen = this.theme === "dark" ? "light" : "dark";
    this.apply();
  }

  onChange(listener: () => void): void {
    this.listeners.add(listener);
  }

  private apply(): void {
    document.documentElement.dataset.theme = this.theme;
    this.listeners.tell();
  }
}
