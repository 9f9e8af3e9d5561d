// Sources in; the script and the style sheet of the page, with a hash of their sources, out.
import { createHash } from "node:crypto";
import { mkdirSync, readFileSync, readdirSync, writeFileSync } from "node:fs";
import { dirname, join, relative } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const assets = join(here, "../src/piper/view/assets");

/** All that the bundle depends on, in the order of their names; tests/null/test_bundle.py hashes alike. */
function sources() {
  const found = readdirSync(join(here, "src"), { recursive: true, withFileTypes: true })
    .filter((entry) => entry.isFile())
    .map((entry) => relative(here, join(entry.parentPath ?? entry.path, entry.name)));
  return [...found, "build.mjs", "package-lock.json", "package.json", "tsconfig.json"].sort();
}

function hash() {
  const sum = createHash("sha256");
  for (const name of sources()) {
    sum.update(`${name}\n`);
    sum.update(readFileSync(join(here, name)));
  }
  return sum.digest("hex");
}

const result = await build({
  absWorkingDir: here,
  entryPoints: { report: "src/main.ts" },
  outdir: "unused",
  bundle: true,
  minify: true,
  write: false,
  format: "iife",
  target: ["chrome110", "firefox113", "safari16.4"],
  charset: "utf8",
  legalComments: "none",
});
mkdirSync(assets, { recursive: true });
for (const file of result.outputFiles) {
  const name = file.path.endsWith(".css") ? "report.css" : "report.js";
  writeFileSync(join(assets, name), `/* sources ${hash()} */\n${file.text}`);
  console.log(`${name}: ${(file.contents.length / 1024).toFixed(1)} KiB`);
}
