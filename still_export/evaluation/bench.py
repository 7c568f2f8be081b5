"""Prefill and decode speed, and peak memory, of a package by context length; one process per length.

As a program (`python -m still_export.evaluation.bench PACKAGE LENGTH SETTING`, JSON) it measures one length and prints JSON. It does not
import torch, so the peak is the runtime's own.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from still_export.errors import ConfigError, PackageError
from still_export.loading.runtimes import open_runner, runtime_of
from still_export.options import option
from still_export.package.checked import read_manifest
from still_export.runtime.base import peak_mb
from still_export.runtime.options import RunnerOptions
from still_export.runtime.sampling import checked_token, likeliest

LENGTHS = (1024, 4096, 8000)
DECODE_STEPS = 24
ROUNDS = 3

BUSY = 0.1
"""Share of the machine's processors that makes it busy, if other programs use it while a length is measured."""


@dataclass(frozen=True)
class Measurement:
    """One context length, each figure the median of its rounds.

    Attributes:
        length: Tokens of the context.
        prefill_s: Seconds of the prefill with the first token.
        decode_ms: Milliseconds of a decode step of all rows.
        peak_mb: Peak memory of the process, MB; of all rounds.
        state_mb: State of all rows, MB.
        prefill_spread, decode_spread: Half of the range of the rounds, relative to their median; None: one round.
        others_cores: Processors that other programs used meanwhile; None: not known on this system.
        cores: Processors of the machine.
    """

    length: int
    prefill_s: float
    decode_ms: float
    peak_mb: float
    batch: int = 1
    state_mb: float = 0.0
    rounds: int = 1
    prefill_spread: float | None = None
    decode_spread: float | None = None
    others_cores: float | None = None
    cores: int = 1


class OtherPrograms:
    """Processors that other programs use, from the creation of this object on; of Linux alone."""

    def __init__(self) -> None:
        self._begin = self._now()

    def cores(self) -> float | None:
        """Processors, on average over time and programs."""
        if self._begin is None or (now := self._now()) is None:
            return None
        all_s, own_s, wall_s = (after - before for before, after in zip(self._begin, now, strict=True))
        return round(max(0.0, all_s - own_s) / wall_s, 2)

    @staticmethod
    def _now() -> tuple[float, float, float] | None:
        """Seconds of processor time of the machine and of this process, and the clock."""
        try:
            with open("/proc/stat", encoding="ascii") as file:
                user, nice, system, _, _, *more = map(int, file.readline().split()[1:9])
        except (OSError, ValueError):
            return None
        ticks = user + nice + system + sum(more)
        return ticks / os.sysconf("SC_CLK_TCK"), time.process_time(), time.perf_counter()


def busy(rows: Sequence[Measurement]) -> bool:
    """Whether other programs used so much of the machine that these figures do not tell the package's speed."""
    return any((row.others_cores or 0.0) > BUSY * row.cores for row in rows)


def load_of(rows: Sequence[Measurement]) -> str:
    """How other programs used the machine meanwhile, in one sentence."""
    known = [row for row in rows if row.others_cores is not None]
    if not known:
        return "what other programs did meanwhile is not known here"
    most = max(known, key=lambda row: row.others_cores or 0.0)
    used = f"other programs used up to {most.others_cores:.1f} of {most.cores} processors meanwhile"
    return (
        f"BUSY MACHINE: {used}. These figures do not tell the speed: measure again when it is idle"
        if busy(rows)
        else used
    )


@dataclass(frozen=True)
class BenchOptions(RunnerOptions):
    """Settings of a measurement with the runner that `run` opens. Context lengths are in tokens."""

    steps: int = option(DECODE_STEPS, "Decode steps per length and round.", least=1)
    rounds: int = option(ROUNDS, "Rounds per length: figures are their median, with the spread.", least=1)
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
    made: dict[str, Iterator[Any]] = {}

    def start() -> None:
        model.start(setting.batch, room)

    def prompt() -> None:
        for begin in range(0, length, model.prefill_tokens):
            logits = model.feed(tokens[:, begin : begin + model.prefill_tokens])
        token = likeliest(logits[:, -1])
        checked_token(int(token.min()))
        made["steps"] = model.greedy(token, setting.steps + 1)

    start()
    model.feed(tokens[:, : model.prefill_tokens])  # the first call of a process loads code and weights
    found = measure_rounds(length, setting, start, prompt, lambda: next(made["steps"]))
    state = model.table.size_bytes(setting.batch, model.rows(model.room)) / 1e6
    return replace(found, peak_mb=model.peak_mb(), state_mb=state)


def measure_rounds(
    length: int, setting: BenchOptions, start: Callable[[], Any], prompt: Callable[[], Any], step: Callable[[], Any]
) -> Measurement:
    """Time `setting.rounds` rounds in this process.

    Args:
        start: Forgets what was read.
        prompt: Reads the prompt and chooses a token.
        step: Chooses the next token; its first call after a prompt is not timed, as it may capture the others.
    """
    others, prefills, steps = OtherPrograms(), [], []
    for _ in range(setting.rounds):
        start()
        begin = time.perf_counter()
        prompt()
        prefills.append(time.perf_counter() - begin)
        step()
        times = []
        for _ in range(setting.steps):
            begin = time.perf_counter()
            step()
            times.append(time.perf_counter() - begin)
        steps.append(statistics.median(times))
    return Measurement(
        length,
        statistics.median(prefills),
        statistics.median(steps) * 1e3,
        peak_mb(),
        setting.batch,
        rounds=setting.rounds,
        prefill_spread=_spread(prefills),
        decode_spread=_spread(steps),
        others_cores=others.cores(),
        cores=os.cpu_count() or 1,
    )


def _spread(rounds: Sequence[float]) -> float | None:
    return (max(rounds) - min(rounds)) / (2 * statistics.median(rounds)) if len(rounds) > 1 else None


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


def speed_of(rows: list[Measurement]) -> dict[str, Any]:
    """Measurements with the machine's load, as bench.json and records have them."""
    return {"busy": busy(rows), "load": load_of(rows), "rows": to_dict(rows)}


if __name__ == "__main__":
    print(json.dumps(asdict(measure(Path(sys.argv[1]), int(sys.argv[2]), BenchOptions(**json.loads(sys.argv[3]))))))
