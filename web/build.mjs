/** Builds `dist`: the runner as a module with its types, and the page with its worker, runtime and fonts of nobody. */
import { cpSync, mkdirSync, rmSync } from "node:fs";
import { createRequire } from "node:module";
import { dirname, join } from "node:path";
import { build } from "esbuild";

const runtime = dirname(createRequire(import.meta.url).resolve("onnxruntime-web"));
rmSync("dist", { recursive: true, force: true });
mkdirSync("dist/page", { recursive: true });
const common = { bundle: true, format: "esm", target: "es2022", logLevel: "warning" };
await build({ ...common, entryPoints: ["src/index.ts"], outfile: "dist/index.js", packages: "bundle" });
await build({ ...common, entryPoints: ["src/worker.ts"], outfile: "dist/page/worker.js", minify: true });
cpSync("../still_export/serving/page", "dist/page", { recursive: true });
for (const name of ["sw.js", "ort.mjs"]) cpSync(`src/${name}`, `dist/page/${name}`);
for (const kind of ["mjs", "wasm"]) cpSync(join(runtime, `ort-wasm-simd-threaded.${kind}`), `dist/page/ort-wasm-simd-threaded.${kind}`);
