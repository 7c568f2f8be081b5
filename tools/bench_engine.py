#!/usr/bin/env python3
"""Time a TensorRT package on the GPU at a context length, with random weights where the package came without its weights.

  python tools/bench_engine.py PACKAGE --context 65536 --batch 1,8 --build --prefill --layers

A model of real geometry need not travel: export it with random or empty weights, leave model.onnx.data behind, and this fills a file of the
recorded size with random numbers. `--build` builds the engine first; `--layers` adds the time by layer of a decode step (TensorRT's
profiler, without a CUDA graph). What is timed is compared first: every row with the row alone, at the start and behind the context. Needs
still_export, without PyTorch. Results are JSON lines on stdout.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from still_export.package.trust import trust_package
from still_export.proof.row_check import check_rows
from still_export.runtime.tensorrt import TrtModel
from still_export.targets.trt.build import build_engines, reopen

WEIGHTS = "model.onnx.data"
BLOCK = 10
"""Steps that are timed together: other work on the GPU then spoils a few blocks and not the time."""


def fill_weights(package: Path) -> None:
    """Write random float16 numbers of weight scale in the place of missing weights."""
    size = json.loads((package / "manifest.json").read_text())["files"][WEIGHTS]["size_bytes"]
    path = package / WEIGHTS
    if path.exists():
        return
    block = (np.random.default_rng(0).standard_normal(1 << 23, dtype=np.float32) * 0.02).astype(np.float16).tobytes()
    with path.open("wb") as file:
        for start in range(0, size, len(block)):
            file.write(block[: size - start])


def build(package: Path) -> dict[str, Any]:
    """Build the engine; what it cost."""
    trust_package(package)
    begin = time.perf_counter()
    (engine,) = build_engines(reopen(package), progress=lambda step: print(step, file=sys.stderr))
    return {"build_s": round(time.perf_counter() - begin, 1), "engine_mib": engine.stat().st_size >> 20}


def decode(model: Any, batch: int, context: int, steps: int) -> dict[str, Any]:
    """Time of a replayed decode step after `context` tokens, of the median block of ten; the state is empty, which costs the same."""
    model.start(batch, context + max(steps, BLOCK) + 8)
    model.length[:] = context
    tokens = model.greedy(np.full(batch, 5), max(steps, BLOCK) + 5)
    for _ in range(5):
        next(tokens)
    blocks = []
    for _ in range(max(1, steps // BLOCK)):
        begin = time.perf_counter()
        for _ in range(BLOCK):
            next(tokens)
        blocks.append((time.perf_counter() - begin) / BLOCK)
    spent = float(np.median(blocks))
    return {
        "batch": batch,
        "context": context,
        "decode_us": round(spent * 1e6, 1),
        "state_mib": model.table.size_bytes(model.batch, model.table.rows(model.room, 1)) >> 20,
    }


def prefill(model: Any, context: int) -> dict[str, Any]:
    """Time of one prefill call of the engine's size after `context` tokens."""
    size = model.prefill_tokens
    ids = np.random.default_rng(0).integers(0, model.manifest["model"]["vocab_size"], (1, size))
    model.start(1, context + size)
    times = []
    for _ in range(6):
        model.length[:] = context
        begin = time.perf_counter()
        model.feed(ids)
        times.append(time.perf_counter() - begin)
    return {"tokens": size, "context": context, "prefill_ms": round(min(times) * 1e3, 3)}


def layers(model: Any, batch: int, context: int) -> dict[str, Any]:
    """Share of the plugins, matrix products and reformats in a decode step, and its slowest layers."""
    trt = model.module

    class Profiler(trt.IProfiler):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            trt.IProfiler.__init__(self)
            self.times: dict[str, float] = {}

        def report_layer_time(self, name: str, ms: float) -> None:
            self.times[name] = self.times.get(name, 0.0) + ms * 1e3

    model.start(batch, context + 8)
    model.length[:] = context
    model.feed(np.full((batch, 1), 5))
    profiler = Profiler()
    model.contexts[model.decode_profile].profiler = profiler
    model.feed(np.full((batch, 1), 5))
    times = profiler.times

    def share(*words: str) -> float:
        return round(sum(t for n, t in times.items() if any(w in n for w in words)), 1)

    slowest = sorted(times.items(), key=lambda item: -item[1])[:12]
    return {
        "batch": batch,
        "step_us": round(sum(times.values()), 1),
        "layers": len(times),
        "plugins_us": round(sum(t for n, t in times.items() if "hybrid_attention" in n and "eformat" not in n), 1),
        "products_us": share("linear", "MatMul"),
        "reformats_us": share("eformat"),
        "slowest_us": {name[:90]: round(t, 1) for name, t in slowest},
    }


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path)
    parser.add_argument("--context", type=int, default=65536, help="tokens already seen (default 65536)")
    parser.add_argument("--batch", default="1,8", help="batches of the decode steps, '' = none (default 1,8)")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--build", action="store_true")
    parser.add_argument("--layers", action="store_true")
    parser.add_argument(
        "--prefill", action="store_true", help="time prefill calls at the start, in the middle and at the end"
    )
    options = parser.parse_args()
    fill_weights(options.package)
    if options.build:
        print(json.dumps(build(options.package)), flush=True)
    batches = [int(b) for b in options.batch.split(",") if b]
    if not batches and not options.prefill:
        return 0
    model = TrtModel(options.package)
    for batch in batches:
        errors = {c: round(check_rows(model, batch, c), 5) for c in (0, options.context)}
        print(json.dumps({"batch": batch, "row_error": errors}), flush=True)
        print(json.dumps(decode(model, batch, options.context, options.steps)), flush=True)
    if options.prefill:
        last = options.context - model.prefill_tokens
        for context in (0, last // 2, last):
            print(json.dumps(prefill(model, max(0, context))), flush=True)
    for batch in batches if options.layers else ():  # last: a profiler that fails must not cost the timings
        print(json.dumps(layers(model, batch, options.context)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
