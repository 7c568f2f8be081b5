"""Time a package on the GPU at a context length, by TensorRT or ONNX Runtime CUDA, with random weights where it came without them.

  python -m tools.benchmarks.gpu_package PACKAGE --runtime trt --context 65536 --batch 1,8 --build --prefill --layers
  python -m tools.benchmarks.gpu_package PACKAGE --runtime ort --context 8000 --calls 512,2048 --kernels

A model of real geometry need not travel: export it with random or empty weights, leave model.onnx.data behind, and this fills a file of the
recorded size with random numbers. A decode step is timed behind an empty state of --context tokens, which costs what a full one does.
TensorRT's engine is compared before it is timed: every sequence of a batch with itself alone, at the start and behind the context.
Prompts and peak memory of a whole package: `still-export bench`. Needs no PyTorch, but for --kernels.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from still_export.engines.row_check import check_rows
from still_export.loading.runtimes import open_runner
from still_export.package.checked import read_manifest
from still_export.package.trust import trust_package
from tools.benchmarks.common import Findings, in_blocks, numbers, parser_of, time_calls

WEIGHTS = "model.onnx.data"
BLOCK = 10
"""Steps that are timed together: other work on the GPU then spoils a few blocks and not the median."""


def fill_weights(package: Path) -> None:
    """Write random numbers of weight scale, in the package's type, in the place of missing weights."""
    manifest = json.loads((package / "manifest.json").read_text(encoding="utf-8"))
    path, size = package / WEIGHTS, manifest["files"][WEIGHTS]["size_bytes"]
    if path.exists():
        return
    kind = np.float32 if manifest["model"]["dtype"] == "float32" else np.float16
    block = (np.random.default_rng(0).standard_normal(1 << 23, dtype=np.float32) * 0.02).astype(kind).tobytes()
    with path.open("wb") as file:
        for start in range(0, size, len(block)):
            file.write(block[: size - start])


def build(package: Path) -> dict[str, Any]:
    """Build the engine; what it cost."""
    from still_export.engines.build import build_engines, reopen

    begin = time.perf_counter()
    (engine,) = build_engines(reopen(package), progress=lambda step: print(step, file=sys.stderr))
    return {"build_s": round(time.perf_counter() - begin, 1), "engine_mib": engine.stat().st_size >> 20}


def decode(model: Any, batch: int, context: int, steps: int) -> dict[str, Any]:
    """Time of a replayed decode step after `context` tokens, in blocks."""
    count = max(steps, BLOCK) + 2 * BLOCK
    model.start(batch, context + count)
    model.length[:] = context
    tokens = model.greedy(np.full(batch, 5), count)
    times = time_calls(in_blocks(lambda: next(tokens), BLOCK), max(1, steps // BLOCK))
    state = model.table.size_bytes(model.batch, model.table.rows(model.room, 1)) >> 20
    figures = times.figures("us")
    spent = {"decode_us": round(times.median / BLOCK * 1e6, 1), "spread": figures["spread"]}
    return {"batch": batch, "context": context, **spent, "state_mib": state}


def guessed(model: Any, batch: int, context: int, guesses: int, steps: int) -> dict[str, Any]:
    """Time of a step of so many guesses, all of which hold, after `context` tokens and within a chunk."""
    chunk = model.table.settled
    context = context // chunk * chunk + 1
    model.start(batch, context + guesses + 1)
    ids = np.full((batch, guesses + 1), 5)

    def call() -> None:
        model.length = np.full(batch, context, np.int64)
        model.guess(ids, greedy=True)
        model.accept(np.full(batch, guesses + 1))

    figures = time_calls(call, steps).figures("us")
    return {"batch": batch, "context": context, "guesses": guesses, **figures}


def drawn(model: Any, batch: int, context: int, guesses: int, share: float, steps: int) -> dict[str, Any]:
    """Tokens a second of steps of so many guesses, each of which holds in `share` of the cases where those before it do."""
    model.start(batch, context + (guesses + 1) * (steps + BLOCK))
    model.length[:] = context
    ids, random = np.full((batch, guesses + 1), 5), np.random.default_rng(0)
    held = (random.random((steps + BLOCK, batch, guesses)) < share).cumprod(-1).sum(-1) + 1
    begin = 0.0
    for step, accepted in enumerate(held):
        if step == BLOCK:
            begin = time.perf_counter()
        model.guess(ids, greedy=True)
        model.accept(accepted)
    seconds = time.perf_counter() - begin
    of_one = held[BLOCK:].sum() / batch
    return {
        "batch": batch,
        "context": context,
        "guesses": guesses,
        "hold": share,
        "tokens_a_step": round(float(of_one) / steps, 2),
        "ms_a_token": round(1e3 * seconds / float(of_one), 3),
    }


def prefill_call(model: Any, context: int) -> dict[str, Any]:
    """Time of one prefill call of the package's size behind `context` tokens."""
    size = model.prefill_tokens
    ids = np.random.default_rng(0).integers(0, model.manifest["model"]["vocab_size"], (1, size))
    model.start(1, context + size)

    def call() -> None:
        model.length[:] = context
        model.feed(ids)

    return {"tokens": size, "context": context, "prefill_ms": round(time_calls(call, 5).best * 1e3, 3)}


def prefill_whole(model: Any, context: int, size: int, runs: int) -> dict[str, Any]:
    """The best time of `runs` prompts of `context` tokens from an empty state, in calls of `size`, behind a prompt of two calls."""
    ids = np.random.default_rng(0).integers(3, model.manifest["model"]["vocab_size"], (1, context))

    def call(tokens: int = context) -> None:
        model.start(1, context + 64)
        for start in range(0, tokens, size):
            model.feed(ids[:, start : start + size])

    call(min(2 * size, context))
    best = time_calls(call, runs, warm=0).best
    return {"tokens": context, "calls_of": size, "prefill_ms": round(best * 1e3, 1)}


def layers(model: Any, batch: int, context: int) -> dict[str, Any]:
    """Share of the plugins, linear layers and reformats in a decode step of TensorRT, and its slowest layers."""
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
        "linear_us": share("linear", "MatMul"),
        "reformats_us": share("eformat"),
        "slowest_us": {name[:90]: round(t, 1) for name, t in slowest},
    }


def kernels(model: Any, context: int, steps: int = 16) -> dict[str, Any]:
    """What the GPU runs in a replayed step of ONNX Runtime, by PyTorch's profiler."""
    import torch

    model.start(1, context + 64)
    model.length[:] = context
    next(model.greedy(np.full(1, 5), 8))
    call = model.captures.capture(1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            model.session.run_with_iobinding(call.binding, call.options)
        torch.cuda.synchronize()
    found = sorted(profiler.key_averages(), key=lambda each: -each.self_device_time_total)
    return {
        "context": context,
        "launches": round(sum(each.count for each in found) / steps, 1),
        "kernels_us": round(sum(each.self_device_time_total for each in found) / steps, 1),
        "slowest_us": {each.key[:90]: round(each.self_device_time_total / steps, 1) for each in found[:12]},
    }


def main() -> int:
    """Command line."""
    parser = parser_of(__doc__)
    parser.add_argument("package", type=Path)
    parser.add_argument("--runtime", choices=("trt", "ort"), required=True)
    parser.add_argument(
        "--provider", choices=("cuda", "cpu"), default="cuda", help="of ONNX Runtime; cpu to try this tool"
    )
    parser.add_argument("--context", type=int, default=65536, help="tokens already seen (default 65536)")
    parser.add_argument("--batch", default="1,8", help="sequences of the decode steps, '' = none (default 1,8)")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--guesses", default="", help="steps of so many guesses, of a package with --speculate")
    parser.add_argument("--hold", type=float, help="tokens a second too where this share of guesses holds, by chance")
    parser.add_argument("--build", action="store_true", help="build TensorRT's engine first")
    parser.add_argument(
        "--prefill", action="store_true", help="a prefill call at the start, in the middle and at the end"
    )
    parser.add_argument("--calls", default="", help="prefill of --context tokens in calls of these sizes")
    parser.add_argument("--runs", type=int, default=3, help="times that --calls are repeated (default 3)")
    parser.add_argument("--layers", action="store_true", help="time by layer of a decode step of TensorRT")
    parser.add_argument("--kernels", action="store_true", help="kernels of a replayed decode step of ONNX Runtime")
    options = parser.parse_args()
    found, batches = Findings(), numbers(options.batch)
    fill_weights(options.package)
    trust_package(options.package)
    manifest = read_manifest(options.package)
    if options.build:
        found.add(**build(options.package))
    if batches or options.prefill or options.calls:
        provider = options.provider if options.runtime == "ort" else "cpu"  # the word for none
        model = open_runner(
            options.package, manifest, options.runtime, provider, check=False
        )  # random weights have another hash
        context = options.context
        for batch in batches:
            if options.runtime == "trt":
                found.add(batch=batch, row_error={str(c): round(check_rows(model, batch, c), 5) for c in (0, context)})
            found.add(**decode(model, batch, context, options.steps))
            for guesses in numbers(options.guesses):
                found.add(**guessed(model, batch, context, guesses, options.steps))
                if options.hold is not None:
                    found.add(**drawn(model, batch, context, guesses, options.hold, options.steps))
        last = max(0, context - model.prefill_tokens)
        for start in (0, last // 2, last) if options.prefill else ():
            found.add(**prefill_call(model, start))
        for size in numbers(options.calls):
            found.add(**prefill_whole(model, context, size, options.runs))
        for batch in batches if options.layers else ():  # last: a profiler that fails must not cost the timings
            found.add(**layers(model, batch, context))
        if options.kernels:
            found.add(**kernels(model, context))
    subject = {"package": options.package.name, "target": manifest["target"], "dtype": manifest["model"]["dtype"]}
    found.record(options.record, f"{options.package.name}, {options.runtime}", subject)
    return 0


if __name__ == "__main__":
    sys.exit(main())
