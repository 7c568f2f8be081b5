"""Prefill and decode speed, and peak memory, of a package by context length; one process per length.

As a program (`python -m still_export.evaluation.bench PACKAGE LENGTH SETTING`, JSON) it measures one length and prints JSON: no torch is
imported, so the peak is the runtime's own.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from still_export.package.checked import read_manifest
from still_export.proof.reference import open_runner
from still_export.runtime.sampling import likeliest

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


@dataclass(frozen=True)
class Setting:
    """How a package is measured: decode steps, threads (0 = the runtime's choice), rows, and the runner that `run` would open."""

    steps: int = DECODE_STEPS
    threads: int = 0
    batch: int = 1
    runtime: str = "ort"
    provider: str = "cpu"

    def room(self, length: int) -> int:
        """Tokens that a package holds at the end of a measurement at `length`: a step before those that are timed captures them."""
        return length + self.steps + 1


def measure(package: Path, length: int, setting: Setting) -> Measurement:
    """Measure one context length in this process: random tokens in pieces as a prompt is fed, then greedy decoding."""
    manifest = read_manifest(package)
    model = open_runner(package, manifest, setting.runtime, setting.provider, setting.threads)
    tokens = np.random.default_rng(0).integers(0, manifest["model"]["vocab_size"], (setting.batch, length))
    room = setting.room(length)
    if model.replays:  # the first call of a process loads code
        model.start(setting.batch, room)
        model.feed(tokens[:, : model.prefill_tokens])
    model.start(setting.batch, room)
    begin = time.perf_counter()
    for start in range(0, length, model.prefill_tokens):
        logits = model.feed(tokens[:, start : start + model.prefill_tokens])
    token = likeliest(logits[:, -1])
    prefill = time.perf_counter() - begin
    times = []
    steps = model.greedy(token, setting.steps + 1)
    next(steps)  # captures the step, where steps are replayed
    for _ in range(setting.steps):
        begin = time.perf_counter()
        next(steps)
        times.append(time.perf_counter() - begin)
    state = model.table.size_bytes(setting.batch, model.table.rows(model.room, model.least_rows)) / 2**20
    return Measurement(length, prefill, statistics.median(times) * 1e3, model.peak_mb(), setting.batch, state)


def bench(
    package: Path,
    lengths: tuple[int, ...] = LENGTHS,
    setting: Setting = Setting(),
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
        command += [str(length), json.dumps(asdict(setting))]
        done = subprocess.run(command, text=True, capture_output=True)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            reason = re.sub(r"^[\w.]+Error: ", "", reason)  # the message, without the class that a traceback names
            raise PackageError(f"measuring {length} tokens failed: {reason}")
        rows.append(Measurement(**json.loads(done.stdout.strip().splitlines()[-1])))
        progress(f"{length} tokens")
    return rows


def to_dict(rows: list[Measurement]) -> list[dict[str, Any]]:
    """Values that JSON can hold."""
    return [asdict(row) for row in rows]


if __name__ == "__main__":
    print(json.dumps(asdict(measure(Path(sys.argv[1]), int(sys.argv[2]), Setting(**json.loads(sys.argv[3]))))))
