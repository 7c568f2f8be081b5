"""Prefill and decode speed, and peak memory, of a package by context length; one process per length.

As a program (`python -m still_export.evaluation.bench PACKAGE LENGTH STEPS THREADS BATCH`) it measures one length and prints JSON: no
torch is imported, so the peak is the runtime's own.
"""

from __future__ import annotations

import json
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

LENGTHS = (1024, 4096, 8000)
DECODE_STEPS = 24


@dataclass(frozen=True)
class Measurement:
    """One context length: time of its prefill with the first token, median time of a decode step of all rows, peak memory."""

    length: int
    prefill_s: float
    decode_ms: float
    peak_mb: float
    batch: int = 1
    state_mb: float = 0.0


def measure(package: Path, length: int, steps: int = DECODE_STEPS, threads: int = 0, batch: int = 1) -> Measurement:
    """Measure one context length in this process: random tokens, greedy decoding, on the runtime that the package is for.

    `batch` rows for TensorRT; one for ONNX Runtime.
    """
    if json.loads((package / "manifest.json").read_text(encoding="utf-8")).get("target") == "trt":
        return _measure_trt(package, length, steps, batch)
    from still_export.runners.ort import OrtModel

    model = OrtModel(package, threads)
    model.start()
    vocabulary = int(model.manifest["model"]["vocab_size"])
    tokens = np.random.default_rng(0).integers(0, vocabulary, length)
    begin = time.perf_counter()
    token = int(model.prefill(tokens).argmax())
    prefill = time.perf_counter() - begin
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        token = int(model.feed(np.array([[token]], np.int64))[0, -1].argmax())
        times.append(time.perf_counter() - begin)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return Measurement(length, prefill, statistics.median(times) * 1e3, peak)


def _measure_trt(package: Path, length: int, steps: int, batch: int) -> Measurement:
    """The same on TensorRT: decode steps are replays of a CUDA graph, and the memory is the GPU's."""
    from still_export.runners.tensorrt import TrtModel

    model = TrtModel(package)
    tokens = np.random.default_rng(0).integers(0, int(model.manifest["model"]["vocab_size"]), (batch, length))
    model.start(batch, tokens=length + steps + 1)
    model.feed(tokens[:, : model.prefill_tokens])  # the first call of a process loads code
    model.start(batch, tokens=length + steps + 1)
    begin = time.perf_counter()
    token = model.feed(tokens)[:, -1].argmax(-1)
    prefill = time.perf_counter() - begin
    times = []
    replays = model.greedy(token, steps + 1)
    next(replays)  # captures the step
    for _ in range(steps):
        begin = time.perf_counter()
        next(replays)
        times.append(time.perf_counter() - begin)
    free, total = model.driver.memory()
    decode, peak = statistics.median(times) * 1e3, (total - free) / 2**20
    return Measurement(length, prefill, decode, peak, batch, model.state_bytes() / 2**20)


def bench(
    package: Path,
    lengths: tuple[int, ...] = LENGTHS,
    steps: int = DECODE_STEPS,
    threads: int = 0,
    batch: int = 1,
    progress: Callable[[str], None] = lambda done: None,
) -> list[Measurement]:
    """Measure each of `lengths` in a process of its own.

    Raises:
        PackageError: A measurement failed; the message holds its own.
    """
    from still_export.errors import PackageError

    rows = []
    for length in lengths:
        command = [sys.executable, "-m", "still_export.evaluation.bench", str(package)]
        command += map(str, (length, steps, threads, batch))
        done = subprocess.run(command, text=True, capture_output=True)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            reason = re.sub(r"^[\w.]+Error: ", "", reason)  # the message, without the class that a traceback names
            raise PackageError(f"measuring {length} tokens failed: {reason}")
        rows.append(Measurement(**json.loads(done.stdout.strip().splitlines()[-1])))
        progress(f"{length} tokens")
    return rows


def plot(series: dict[str, list[Measurement]], path: Path) -> None:
    """Write a figure of `series` (by label) to `path`: prefill, decode and memory over the context length."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    panels: list[tuple[str, Callable[[Measurement], float]]] = [
        ("prefill, s", lambda m: m.prefill_s),
        ("decode, ms a token", lambda m: m.decode_ms),
        ("peak memory, MB", lambda m: m.peak_mb),
    ]
    figure, axes = pyplot.subplots(1, len(panels), figsize=(12, 3.6), layout="constrained")
    for axis, (title, value) in zip(axes, panels, strict=True):
        for label, rows in series.items():
            axis.plot([m.length for m in rows], [value(m) for m in rows], marker="o", label=label)
        axis.set(title=title, xlabel="context, tokens", ylim=(0, None))
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def to_dict(rows: list[Measurement]) -> list[dict[str, Any]]:
    """Values that JSON can hold."""
    return [asdict(row) for row in rows]


if __name__ == "__main__":
    print(json.dumps(asdict(measure(Path(sys.argv[1]), *map(int, sys.argv[2:6])))))
