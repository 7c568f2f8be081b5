"""Measure a package of `--to web` in a headless Chromium, by the runner that the page has.

  python -m tools.benchmarks.web_page PACKAGE --tokens 256,1024,8192 --steps 32 --threads 2

Needs the built page (`npm install --ignore-scripts && npm run build` in the folder `web`), playwright and a Chromium. Prompts are token
ids of no meaning. Memory is the largest sum of what the browser's processes held, from /proc, and that before the page was opened.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import threading
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil

PAGE = Path(__file__).resolve().parents[2] / "web" / "dist"

WORKER = """
import { Model } from "./index.js";
self.onmessage = async ({ data: { threads, tokens, steps, forever } }) => {
  const say = (said) => self.postMessage(said);
  try {
    const files = async (name) => new Uint8Array(await (await fetch(new URL(`package/${name}`, location.href))).arrayBuffer());
    let begun = performance.now();
    const model = await Model.open(files, { runtime: new URL("page/", location.href).href, threads });
    say({ load_s: (performance.now() - begun) / 1000 });
    const vocabulary = model.manifest.model.vocab_size;
    const ids = (n) => Array.from({ length: n }, (_, i) => (i * 7919 + 13) % vocabulary);
    for (const count of tokens) {
      model.start();
      model.reserve(count + steps);
      begun = performance.now();
      await model.prefill(ids(count));
      const first = performance.now() - begun;
      const times = [];
      for (let i = 0; i < steps; i++) {
        begun = performance.now();
        await model.feed([(i * 31 + 5) % vocabulary]);
        times.push(performance.now() - begun);
      }
      times.sort((a, b) => a - b);
      say({ tokens: count, first_token_s: first / 1000, step_ms: times[times.length >> 1], fastest_ms: times[0], ...model.memory() });
    }
    model.start();
    for (let read = 0; read < forever; ) {
      const left = model.manifest.capacity.bounded ? model.manifest.capacity.capacity_tokens - model.length : forever;
      if (left < 256) model.start();
      await model.prefill(ids(256));
      if ((read += 256) % 5120 === 0) say({ read, ...model.memory() });
    }
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


def main() -> None:
    """Command line."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path)
    parser.add_argument("--tokens", default="256", help="lengths of prompts, with commas")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--forever", type=int, default=0, help="then read so many tokens, and say what is held")
    parser.add_argument("--limit-s", type=float, default=600)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as run:
        root = Path(folder)
        shutil.copytree(PAGE, root, dirs_exist_ok=True)
        (root / "package").symlink_to(asked.package.resolve())
        (root / "bench.js").write_text(WORKER)
        (root / "bench.html").write_text("<!doctype html><title>bench</title><link rel=icon href='data:,'>")
        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Server, directory=folder))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
        browser = run.chromium.launch(executable_path=path, args=["--no-sandbox"])
        tab = browser.new_page()
        tab.goto(f"http://127.0.0.1:{server.server_address[1]}/bench.html")
        before = peak = held_mb()
        work = {"threads": asked.threads, "tokens": [int(t) for t in asked.tokens.split(",")], "steps": asked.steps}
        tab.evaluate(
            "work => { self.said = []; const w = new Worker('bench.js', {type: 'module'}); w.onmessage = e => said.push(e.data);"
            " w.onerror = e => said.push({error: e.message, ended: true}); w.postMessage(work) }",
            {**work, "forever": asked.forever},
        )
        seen, end = 0, time.monotonic() + asked.limit_s
        while time.monotonic() < end:
            time.sleep(0.25)
            peak = max(peak, held_mb())
            said = tab.evaluate("self.said")
            for entry in said[seen:]:
                entry |= {"held_mb": round(held_mb() - before), "load": os.getloadavg()[0]}
                print(json.dumps(entry), flush=True)
            seen = len(said)
            if said and said[-1].get("ended"):
                break
        print(json.dumps({"peak_mb": round(peak), "before_mb": round(before), "browser": browser.version}))
        browser.close()
        server.shutdown()


if __name__ == "__main__":
    main()
