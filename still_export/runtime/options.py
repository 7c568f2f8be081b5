"""How a package is opened: what verbs that run one share, as flags and as arguments of `still_export.load`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from still_export.options import option


@dataclass(frozen=True)
class RunnerOptions:
    """Who computes a package's graph."""

    runtime: str | None = option(None, "ort, trt or torch.", shown="the package's target")
    provider: str = option("cpu", "Of ONNX Runtime: cpu or cuda.")
    threads: int = option(0, "0 = OMP_NUM_THREADS, or the runtime's choice.", least=0)


@dataclass(frozen=True)
class LoadOptions(RunnerOptions):
    """The same of a package that answers."""

    plugin: Path | None = option(None, "trt: plugin library in the place of the package's.")
    guess: str | None = option(
        None,
        "Who guesses tokens of a package exported with --speculate: mtp (a head that the model was published with), lookup (in what was "
        "read and said), none, or the folder of a draft model's package.",
        shown="mtp where there is one, else lookup",
    )
    check: bool = option(True, "Compare the weights with their hashes.", flag="--check/--no-check", shown="check")
