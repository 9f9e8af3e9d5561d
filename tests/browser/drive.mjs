// A browser that is told what to do, a line of JSON each: {"do": name, ...} in; {"ok": value} or {"error": text} out.
import { createInterface } from "node:readline";
import { chromium } from "../../web/node_modules/playwright-core/index.mjs";

const FLAGS = [
  "--headless",
  "--no-sandbox",
  "--disable-gpu",
  "--disable-quic",
  "--no-first-run",
  "--disable-background-networking",
  "--disable-component-update",
  "--disable-sync",
  "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", // and to be sure of it
];
const [, , executablePath, folder] = process.argv;
const context = await chromium.launchPersistentContext(folder, {
  executablePath,
  args: FLAGS,
  viewport: { width: 1280, height: 720 },
  offline: true, // a report needs no network
});
let page = null;
const problems = [];

const drawn = () =>
  page.evaluate(() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done))));

const actions = {
  /** A file, or the page of a server on this machine, which may ask that server alone. */
  async open({ file, url, theme, ms }) {
    await page?.close();
    await context.setOffline(!url);
    page = await context.newPage();
    const own = url ? `${new URL(url).origin}/` : "file:";
    page.on("console", (message) => {
      if (["error", "warning"].includes(message.type())) problems.push(message.text());
    });
    page.on("pageerror", (error) => problems.push(String(error)));
    page.on("request", (request) => {
      if (!/^(blob|data):/.test(request.url()) && !request.url().startsWith(own)) problems.push(`asked for ${request.url()}`);
    });
    await page.emulateMedia({ colorScheme: theme ?? "light" });
    const began = performance.now();
    await page.goto(url ?? `file://${file}`);
    await page.waitForSelector("html[data-ready=yes]", { timeout: ms ?? 30_000 });
    await drawn();
    return performance.now() - began;
  },
  /** In the page, or in the frame with this number. */
  evaluate: ({ code, frame }) => page.frames()[frame ?? 0].evaluate(code),
  click: ({ x, y }) => page.mouse.click(x, y),
  choose: ({ selector }) => page.click(selector),
  move: ({ x, y }) => page.mouse.move(x, y),
  async wheel({ x, y, by, keys }) {
    await page.mouse.move(x, y);
    for (const key of keys ?? []) await page.keyboard.down(key);
    await page.mouse.wheel(0, by);
    for (const key of keys ?? []) await page.keyboard.up(key);
  },
  async drag({ x, y, toX, toY }) {
    await page.mouse.move(x, y);
    await page.mouse.down();
    await page.mouse.move((x + toX) / 2, (y + toY) / 2, { steps: 4 });
    await page.mouse.move(toX, toY, { steps: 4 });
    await page.mouse.up();
  },
  async press({ key, ms }) {
    await page.keyboard.down(key);
    if (ms) await page.waitForTimeout(ms);
    await page.keyboard.up(key);
  },
  hold: ({ key }) => page.keyboard.down(key),
  release: ({ key }) => page.keyboard.up(key),
  text: ({ selector }) => page.innerText(selector),
  async reload() {
    await page.reload();
    await page.waitForSelector("html[data-ready=yes]");
  },
  /** By asking again and again: pages may forbid code that waits in them. */
  async wait({ code, ms }) {
    const until = performance.now() + ms;
    while (!(await page.evaluate(code))) {
      if (performance.now() > until) throw new Error(`not after ${ms} ms: ${code}`);
      await page.waitForTimeout(30);
    }
  },
  async picture({ path }) {
    await drawn();
    await page.screenshot({ path });
  },
  async size({ width, height }) {
    await page.setViewportSize({ width, height });
    await drawn();
  },
  problems: () => problems.splice(0),
  async leave() {
    await page?.close();
    page = null;
    return problems.splice(0);
  },
};

console.log(JSON.stringify({ ok: "ready" }));
for await (const line of createInterface({ input: process.stdin })) {
  const { do: name, ...rest } = JSON.parse(line);
  try {
    console.log(JSON.stringify({ ok: (await actions[name](rest)) ?? null }));
  } catch (error) {
    console.log(JSON.stringify({ error: String(error) }));
  }
}
await context.close();
