"""Measure packages of `--to web` in a headless Chromium by the runner that the page has, and transformers.js in the same browser.

  python -m tools.benchmarks.web_page PACKAGE@256 OTHER@1024,8192 LONG@256+30720 \\
      --peer BASE@256 --dtypes q4,q8 --transformers-js NODE_MODULES

Of each part what is said: load, time to the first token and a step behind prompts of these lengths (token ids of no meaning), and with +N
what is held while N tokens more are read; a package of bounded capacity begins anew at its end. Each part has a browser of its own. Memory
is the largest sum of what the browser's processes held, from /proc, less an empty tab's. A part that meets --limit-s says how far it came.

Needs the built page (`npm install --ignore-scripts && npm run build` in the folder `web`), playwright and a Chromium. BASE is a folder that
transformers.js reads: config.json, the tokenizer's files, onnx/model_q4.onnx and so on, with weights beside them (*.onnx_data).
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil

from tools.benchmarks.common import Findings, numbers, parser_of

PAGE = Path(__file__).resolve().parents[2] / "web" / "dist"

WORKER = """
const at = (path) => new URL(path, location.href).href;
const median = (times) => [...times].sort((a, b) => a - b)[times.length >> 1];
const ids = (n, vocabulary) => Array.from({ length: n }, (_, i) => (i * 7919 + 13) % vocabulary);

async function own({ threads, tokens, steps, forever }, say) {
  const { Model } = await import(at("index.js"));
  const files = async (name) => new Uint8Array(await (await fetch(at(`package/${name}`))).arrayBuffer());
  let begun = performance.now();
  const model = await Model.open(files, { runtime: at("page/"), threads });
  say({ load_s: (performance.now() - begun) / 1000 });
  const { model: { vocab_size }, capacity: { bounded, capacity_tokens }, prefill_tokens } = model.manifest;
  for (const count of tokens) {
    model.start();
    model.reserve(count + steps);
    begun = performance.now();
    await model.prefill(ids(count, vocab_size), (read) => say({ tokens: count, read, after_s: (performance.now() - begun) / 1000 }, true));
    const first = performance.now() - begun, times = [];
    for (let i = 0; i < steps; i++) {
      begun = performance.now();
      await model.feed([(i * 31 + 5) % vocab_size]);
      times.push(performance.now() - begun);
    }
    say({ tokens: count, first_token_s: first / 1000, step_ms: median(times), fastest_ms: Math.min(...times), ...model.memory() });
  }
  model.start();
  for (let read = 0; read < forever; ) {
    if (bounded && capacity_tokens - model.length < prefill_tokens) model.start();
    await model.prefill(ids(prefill_tokens, vocab_size));
    if ((read += prefill_tokens) % (20 * prefill_tokens) === 0) say({ read, ...model.memory() });
  }
}

async function peer({ threads, tokens, steps, dtype, external }, say) {
  const { AutoModelForCausalLM, Tensor, env } = await import(at("transformers.js"));
  Object.assign(env, { allowRemoteModels: false, allowLocalModels: true, localModelPath: at("./") });
  Object.assign(env, { useBrowserCache: false, useWasmCache: false });
  Object.assign(env.backends.onnx.wasm, { numThreads: threads, wasmPaths: at("ort/"), proxy: false });
  let begun = performance.now();
  const model = await AutoModelForCausalLM.from_pretrained("package", { dtype, device: "wasm", use_external_data_format: external });
  say({ load_s: (performance.now() - begun) / 1000, version: env.version });
  for (const count of tokens) {
    const row = BigInt64Array.from(ids(count, model.config.vocab_size).map(BigInt));
    const input_ids = new Tensor("int64", row, [1, count]), attention_mask = new Tensor("int64", row.map(() => 1n), [1, count]);
    const times = [];
    begun = performance.now();
    const streamer = { put: () => times.push(performance.now()), end() {} };  // the prompt is put first
    await model.generate({ input_ids, attention_mask, max_new_tokens: steps + 1, min_new_tokens: steps + 1, do_sample: false, streamer });
    const each = times.slice(2).map((t, i) => t - times[i + 1]);
    say({ tokens: count, first_token_s: (times[1] - begun) / 1000, step_ms: median(each), fastest_ms: Math.min(...each) });
  }
}

self.onmessage = async ({ data }) => {
  const say = (said, passing = false) => self.postMessage({ ...said, passing });
  try {
    await (data.dtype ? peer : own)(data, say);
    say({ ended: true });
  } catch (error) {
    say({ error: String(error), ended: true });
  }
};
"""


class Server(SimpleHTTPRequestHandler):
    """Isolated, so that the runtime has threads; without a log."""

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def end_headers(self) -> None:
        self.send_header("Cross-Origin-Opener-Policy", "same-origin")
        self.send_header("Cross-Origin-Embedder-Policy", "require-corp")
        super().end_headers()


def held_mb() -> float:
    """Memory that the processes started here hold, pages that they share counted once a process in proportion."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        try:
            total += process.memory_full_info().pss / 1e6
        except psutil.Error:
            continue
    return total


def measure(run: Any, url: str, what: str, work: dict[str, Any], limit_s: float, found: Findings) -> None:
    """One part in a browser of its own."""
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    browser = run.chromium.launch(executable_path=path, args=["--no-sandbox"])
    tab = browser.new_page()
    tab.goto(f"{url}bench.html")
    before = peak = held_mb()
    tab.evaluate(
        "work => { self.said = []; self.w = new Worker('bench.js', {type: 'module'}); w.onmessage = e => said.push(e.data);"
        " w.onerror = e => said.push({error: e.message, ended: true}); w.postMessage(work) }",
        work,
    )
    seen, end, last = 0, time.monotonic() + limit_s, dict[str, Any]()
    while not last.get("ended") and time.monotonic() < end:
        time.sleep(0.25)
        peak = max(peak, held_mb())
        said = tab.evaluate("self.said")
        for last in said[seen:]:
            said_here = {
                k: round(v, 3) if isinstance(v, float) else v for k, v in last.items() if k not in ("passing", "ended")
            }
            if said_here and not last.get("passing"):
                found.add(what=what, **said_here, held_mb=round(held_mb() - before), load=round(os.getloadavg()[0], 1))
        seen = len(said)
    if not last.get("ended"):
        found.add(what=what, ended=f"after {limit_s} s", **{k: v for k, v in last.items() if k != "passing"})
    found.add(what=what, peak_mb=round(peak - before), empty_tab_mb=round(before), browser=browser.version)
    browser.close()


def main() -> None:
    """Command line."""
    from playwright.sync_api import sync_playwright

    parser = parser_of(__doc__)
    parser.add_argument("parts", nargs="*", metavar="PACKAGE@LENGTHS[+TOKENS]")
    parser.add_argument("--peer", default="", metavar="BASE@LENGTHS", help="what transformers.js reads")
    parser.add_argument("--dtypes", default="q4", help="of the peer: q4, q8, fp32 with commas")
    parser.add_argument(
        "--transformers-js", type=Path, metavar="NODE_MODULES", help="where @huggingface/transformers is installed"
    )
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit-s", type=float, default=600, help="of a part")
    asked = parser.parse_args()
    if asked.peer and not asked.transformers_js:
        parser.error("--peer needs --transformers-js NODE_MODULES")
    found = Findings()
    kinds = [(part, "") for part in asked.parts] + [(asked.peer, t) for t in asked.dtypes.split(",") if asked.peer]
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as run:
        root = Path(folder)
        shutil.copytree(PAGE, root, dirs_exist_ok=True)
        if asked.transformers_js:
            source = asked.transformers_js.resolve() / "@huggingface" / "transformers"
            (root / "transformers.js").symlink_to(source / "dist" / "transformers.js")
            inner = source / "node_modules" / "onnxruntime-web"
            (root / "ort").symlink_to((inner if inner.is_dir() else source.parents[1] / "onnxruntime-web") / "dist")
        (root / "bench.js").write_text(WORKER)
        (root / "bench.html").write_text("<!doctype html><title>bench</title><link rel=icon href='data:,'>")
        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Server, directory=folder))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for part, dtype in kinds:
            place, _, lengths = part.rpartition("@")
            lengths, _, forever = lengths.partition("+")
            (root / "package").unlink(missing_ok=True)
            (root / "package").symlink_to(Path(place).resolve())
            work = {
                "threads": asked.threads,
                "tokens": numbers(lengths),
                "steps": asked.steps,
                "forever": int(forever or 0),
            }
            if dtype:
                suffix = {"fp32": "", "q8": "_quantized"}.get(dtype, f"_{dtype}")
                external = Path(place, "onnx", f"model{suffix}.onnx_data").is_file()
                work |= {"dtype": dtype, "external": external}
            what = f"{Path(place).name}, transformers.js {dtype}" if dtype else Path(place).name
            measure(run, f"http://127.0.0.1:{server.server_address[1]}/", what, work, asked.limit_s, found)
        server.shutdown()
    found.record(asked.record, "web page", {"parts": " ".join(asked.parts), "peer": asked.peer})


if __name__ == "__main__":
    main()
