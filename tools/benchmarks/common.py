"""What all benchmarks share: one way to time, to take turns with a peer, and to write a record."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Call = Callable[[], object]
Clock = Callable[[], float]


@dataclass(frozen=True)
class Times:
    """Seconds of each run of one thing, in order; those that warmed up are not among them."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def best(self) -> float:
        return min(self.seconds)

    @property
    def spread(self) -> float:
        """From the first to the third quartile, relative to the median; 0 of fewer than four runs."""
        if len(self.seconds) < 4:
            return 0.0
        first, _, third = statistics.quantiles(self.seconds, n=4)
        return (third - first) / self.median

    def figures(self, unit: str = "ms") -> dict[str, float]:
        """Median and best in `unit` (s, ms or us), spread and runs, named for a record."""
        factor = {"s": 1.0, "ms": 1e3, "us": 1e6}[unit]
        return {
            f"median_{unit}": round(self.median * factor, 4),
            f"best_{unit}": round(self.best * factor, 4),
            "spread": round(self.spread, 4),
            "runs": len(self.seconds),
        }


def time_in_turns(
    calls: Mapping[str, Call], runs: int, warm: int = 1, clock: Clock = time.perf_counter
) -> dict[str, Times]:
    """Time every call `runs` times in turns, A B A B: what disturbs the machine meanwhile disturbs all of them.

    Args:
        calls: What is timed, by name; a call ends when its work has, on a GPU too.
        warm: Turns before those that are timed.
        clock: `time.process_time` where other processes of the machine are in the way.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(warm + runs):
        for name, call in calls.items():
            begin = clock()
            call()
            if turn >= warm:
                seconds[name].append(clock() - begin)
    return {name: Times(tuple(each)) for name, each in seconds.items()}


def time_calls(call: Call, runs: int, warm: int = 1, clock: Clock = time.perf_counter) -> Times:
    """Time one call without a peer."""
    return time_in_turns({"": call}, runs, warm, clock)[""]


def in_blocks(call: Call, block: int, waits: Call = lambda: None) -> Call:
    """`call` so many times in a row, then a wait for the device: for calls that return before their work ends, or take microseconds."""

    def run() -> None:
        for _ in range(block):
            call()
        waits()

    return run


def replayed(work: Call) -> Call:
    """`work`, of PyTorch on a GPU, as a replay of the CUDA graph that it is recorded in."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """A benchmark's parser: its docstring is the help, and --record writes what it measured."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--record", type=Path, metavar="FOLDER", help="write a record of what is measured into this folder"
    )
    return parser


def numbers(text: str) -> list[int]:
    """Of "1,8"; of "" none."""
    return [int(part) for part in text.split(",") if part]


def changes_in(text: str) -> dict[str, Any]:
    """Options of a recipe in a text such as "finetune_rate=1e-3,retrieval=0.9"."""
    return {name: json.loads(value) for name, value in (item.split("=") for item in text.split(",") if item)}


class Findings:
    """What a benchmark finds: each row is a line of JSON on stdout at once, and all of them are the record's figures."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(self, **row: Any) -> dict[str, Any]:
        """Print one row and keep it."""
        self.rows.append(row)
        print(json.dumps(row), flush=True)
        return row

    def record(self, folder: Path | None, name: str, subject: dict[str, str], seed: int | None = 0) -> None:
        """Write the record, where --record asks for one; its path is the last line."""
        if folder is not None:
            from still_export.proof.records import make_record, write_record

            made = make_record("benchmark", name, subject, {"rows": self.rows}, {}, seed=seed)
            print(f"record: {write_record(made, folder)}", flush=True)
