"""Options of opening and running a package, shared as flags and as arguments of `still_export.load`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from still_export.options import check_options, option

WHEN_FULL = ("ask", "drop", "stop")


@dataclass(frozen=True)
class RunnerOptions:
    """Which runtime computes a package's graph."""

    runtime: str | None = option(None, "ort, trt or torch.", shown="the package's target")
    provider: str = option("cpu", "Of ONNX Runtime: cpu or cuda.")
    threads: int = option(0, "0 = OMP_NUM_THREADS, or the runtime's choice.", least=0)


@dataclass(frozen=True)
class LoadOptions(RunnerOptions):
    """Options of a package that answers prompts."""

    plugin: Path | None = option(None, "trt: plugin library in the place of the package's.")
    guess: str | None = option(
        None,
        "Who guesses tokens of a package exported with --speculate: mtp (a head that the model was published with), lookup (in what was "
        "read and said), none, or the folder of a draft model's package.",
        shown="mtp where there is one, else lookup",
    )
    check: bool = option(True, "Compare the weights with their hashes.", flag="--check/--no-check", shown="check")


@dataclass(frozen=True)
class AnswerOptions:
    """Options of `run`, besides those of Sampling."""

    tokens: int | None = option(
        None, "Tokens to generate at most.", shown="128; of a talk's answer 512", least=1, also=("--max-new-tokens",)
    )
    stop: tuple[str, ...] = option((), "Text that ends an answer; repeatable.")
    json_schema: str | None = option(
        None, "The answer follows this JSON Schema: a file, or the schema itself. '{}' is any JSON object."
    )
    when_full: str = option(
        "ask", "Chat at the end of the capacity: ask, drop the oldest turns, or stop.", choices=WHEN_FULL
    )
    prefix_cache: str = option(
        "1GiB", "Chat: memory for states of earlier turns, so that /back reads nothing again; 0 = none."
    )
    prefix_dir: Path | None = option(
        None, "Chat: folder in which they outlive the program; as large as the cache at most."
    )

    def __post_init__(self) -> None:
        check_options(self)
