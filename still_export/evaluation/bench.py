"""Prefill and decode speed, and peak memory, of a package by context length; one process per length.

As a program (`python -m still_export.evaluation.bench PACKAGE LENGTH SETTING`, JSON) it measures one length and prints JSON. It does not
import torch, so the peak is the runtime's own.
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

from still_export.errors import ConfigError, PackageError
from still_export.loading.runtimes import open_runner, runtime_of
from still_export.options import option
from still_export.package.checked import read_manifest
from still_export.runtime.options import RunnerOptions
from still_export.runtime.sampling import checked_token, likeliest

LENGTHS = (1024, 4096, 8000)
DECODE_STEPS = 24


@dataclass(frozen=True)
class Measurement:
    """One context length: time of the prefill with the first token, median time of a decode step of all rows, peak memory."""

    length: int
    prefill_s: float
    decode_ms: float
    peak_mb: float
    batch: int = 1
    state_mb: float = 0.0


@dataclass(frozen=True)
class BenchOptions(RunnerOptions):
    """Settings of a measurement with the runner that `run` opens. Context lengths are in tokens."""

    steps: int = option(DECODE_STEPS, "Decode steps per length.", least=1)
    batch: int = option(1, "Sequences at once.", least=1)
    lengths: tuple[int, ...] = option(
        (), "Context lengths.", commas=True, shown=f"{','.join(map(str, LENGTHS))}, those that fit"
    )

    def room(self, length: int) -> int:
        """Tokens in the package at the end of a measurement at `length`; an untimed step comes first and captures the timed ones."""
        return length + self.steps + 1

    def fitting_lengths(self, manifest: dict[str, Any]) -> tuple[int, ...]:
        """The requested lengths, or by default those of LENGTHS that fit into the package; the longest that fits if none of them does.

        Raises:
            ConfigError: A requested length does not fit.
        """
        capacity = manifest["capacity"]
        most = capacity["capacity_tokens"] if capacity["bounded"] else None
        for length in self.lengths:
            if length < 1 or (most is not None and self.room(length) > most):
                room = f"1 to {most - self.room(0)}" if most is not None else "1 or more"
                raise ConfigError(
                    f"--lengths {length}: this package has room for {room} tokens with {self.steps} steps."
                )
        fitting = tuple(n for n in LENGTHS if most is None or self.room(n) <= most)
        if most is not None and not self.lengths and not fitting:
            if (longest := most - self.room(0)) < 1:
                raise ConfigError(
                    f"--steps {self.steps}: this package has room for {most} tokens. Measure fewer steps."
                )
            return (longest,)
        return self.lengths or fitting


def measure(package: Path, length: int, setting: BenchOptions) -> Measurement:
    """Measure one context length in this process: prefill of random tokens in pieces, then greedy decoding."""
    manifest = read_manifest(package)
    runtime = runtime_of(manifest["target"], setting.runtime).name
    model = open_runner(package, manifest, runtime, setting.provider, threads=setting.threads)
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
    checked_token(int(token.min()))
    prefill = time.perf_counter() - begin
    times = []
    steps = model.greedy(token, setting.steps + 1)
    next(steps)  # captures the step if steps are replayed
    for _ in range(setting.steps):
        begin = time.perf_counter()
        next(steps)
        times.append(time.perf_counter() - begin)
    state = model.table.size_bytes(setting.batch, model.rows(model.room)) / 1e6
    return Measurement(length, prefill, statistics.median(times) * 1e3, model.peak_mb(), setting.batch, state)


def bench(
    package: str | Path,
    options: BenchOptions = BenchOptions(),
    progress: Callable[[str], None] = lambda done: None,
) -> list[Measurement]:
    """Measure prefill, decode and peak memory of a package by context length, each in its own process.

    Args:
        progress: Called with each finished length.

    Returns:
        One measurement per length, in seconds, milliseconds and MB.

    Raises:
        PackageError: A measurement failed; the message has its error.
    """
    rows = []
    for length in options.fitting_lengths(read_manifest(Path(package))):
        command = [sys.executable, "-m", "still_export.evaluation.bench", str(package)]
        command += [str(length), json.dumps(asdict(options))]
        done = subprocess.run(command, text=True, capture_output=True)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            reason = re.sub(r"^[\w.]+Error: ", "", reason)  # drop the traceback's class name
            raise PackageError(f"measuring {length} tokens failed: {reason}")
        rows.append(Measurement(**json.loads(done.stdout.strip().splitlines()[-1])))
        progress(f"{length} tokens")
    return rows


def to_dict(rows: list[Measurement]) -> list[dict[str, Any]]:
    return [asdict(row) for row in rows]


if __name__ == "__main__":
    print(json.dumps(asdict(measure(Path(sys.argv[1]), int(sys.argv[2]), BenchOptions(**json.loads(sys.argv[3]))))))
