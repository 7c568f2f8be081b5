"""Calls that polygraphy repeats by itself: compressed arrays, a data loader, and a command with a bound for every call."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from still_export.package.calls import Arrays
from still_export.package.staging import staged_files
from still_export.proof.cases import Case
from still_export.proof.codes import in_codes
from still_export.proof.sessions import Subject
from still_graphs.states import StateTable
from still_kernels.registry import ties_of
from still_kernels.ties import expected_ties

MOST, MOST_BYTES = 6, 256 << 20
"""Calls that are written at most, and bytes of all that are kept until then."""
TIMES = 8.0
"""Allowed error of a number, in multiples of the largest relative error of PyTorch's own run in the package's type."""
UNITS = 2.0**-18
"""Least allowed error, relative to the largest number of an output: float32's rounding after sums of hundreds of terms."""
TIED = 0.01
"""Calls of a case that choose are left out if rounding turns more choices than this: polygraphy makes its own, and later numbers follow."""
CALLS, LOADER, COMMAND = "calls.npz", "data_loader.py", "polygraphy.sh"

LOADER_TEXT = '''"""PyTorch's calls for polygraphy: `polygraphy run MODEL --onnxrt --data-loader-script data_loader.py`.

Yields the inputs of every call in calls.npz, or with the environment variable STILL_CALL=N those of call N.
`python3 data_loader.py N FILE` writes PyTorch's outputs of call N for --load-outputs.
"""

import os
import sys

import numpy as np

CALLS = np.load(os.path.join(os.path.dirname(os.path.abspath(__file__)), "calls.npz"))


def arrays_of(call, side):
    beginning = f"{call}/{side}/"
    return {name[len(beginning):]: CALLS[name] for name in CALLS.files if name.startswith(beginning)}


def load_data():
    count = len({name.split("/")[0] for name in CALLS.files})
    wanted = os.environ.get("STILL_CALL")
    for call in range(count) if wanted is None else [int(wanted)]:
        yield arrays_of(call, "inputs")


if __name__ == "__main__":
    from polygraphy.comparator import IterationResult, RunResults

    outputs = IterationResult(arrays_of(int(sys.argv[1]), "outputs"), runner_name="pytorch")
    RunResults([("pytorch", [outputs])]).save(sys.argv[2])
'''

COMMAND_TEXT = """#!/bin/sh
# Every call under bounds of its own, number by number. Exit code 1: polygraphy finds a difference.
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
work=$(mktemp -d) || exit 2
trap 'rm -rf "$work"' EXIT
failed=0
call() {{
    number=$1
    shift
    python3 "$here/{loader}" "$number" "$work/outputs.json" || exit 2
    STILL_CALL=$number {run} --data-loader-script "$here/{loader}" --load-outputs "$work/outputs.json" \\
        --check-error-stat elemwise --infinities-compare-equal --rtol 0 --atol "$@" || failed=1
}}
{left_out}{calls}
exit $failed
"""


@dataclass
class CallsFile:
    """Calls in which rounding turns no choice."""

    subject: Subject
    calls: list[tuple[Arrays, Arrays]] = field(default_factory=list)
    share: dict[str, float] = field(default_factory=dict)
    left_out: dict[str, None] = field(default_factory=dict)
    size_bytes: int = 0

    def __post_init__(self) -> None:
        manifest = self.subject.package.manifest
        self.selected = [s for s in StateTable.of(manifest) if s.growth and s.growth["per"] > 1]
        self.shown = all(not op.watched for op in ties_of(manifest).each)

    def add(self, case: Case) -> None:
        """Keep the calls of a case, and how far PyTorch's own run errs. Packed 8-bit states are left out, because differences of their
        words mean nothing."""
        for call in case.own:
            for name, errors in call.items():
                if (size := case.largest.get(name, 0.0)) > 0:
                    self.share[name] = max(self.share.get(name, 0.0), _largest(errors[:1]) / size)
        tied = expected_ties(case.leads) > TIED
        for feed, answer in zip(case.feeds, case.expected, strict=True):
            if tied and not self._selects_nothing(feed, answer):
                self.left_out[case.name] = None
                continue
            kept = {name: x for name, x in answer.items() if name not in in_codes(answer)}
            for saved, expected in zip(*self.subject.saved([feed], [kept]), strict=True):
                size_bytes = sum(x.nbytes for side in (saved, expected) for x in side.values())
                if self.size_bytes + size_bytes <= MOST_BYTES:
                    self.calls.append((saved, expected))
                    self.size_bytes += size_bytes

    def _selects_nothing(self, feed: Arrays, answer: Arrays) -> bool:
        """Whether no state gets rows of selected tokens in this call."""
        return self.shown and all(feed[s.past].shape == answer[s.present].shape for s in self.selected)

    def chosen(self) -> list[tuple[Arrays, Arrays]]:
        """The calls that use most states, the shortest of them first."""

        def order(call: tuple[Arrays, Arrays]) -> tuple[int, int]:
            feed, answer = call
            used = sum(1 for side in (feed, answer) for x in side.values() if np.any(x))
            return -used, feed["input_ids"].size

        return sorted(self.calls, key=order)[:MOST]

    def bounds(self, answer: Arrays) -> dict[str, float]:
        """Allowed error of every number of a call, by output."""
        return {name: max(TIMES * self.share.get(name, 0.0), UNITS) * _largest(x) for name, x in answer.items()}

    def write(self, folder: Path) -> str:
        """Write calls.npz, data_loader.py and polygraphy.sh into the existing `folder`; returns the command, "" without calls."""
        if not (calls := self.chosen()):
            return ""
        arrays = {
            f"{number}/{side}/{name}": x
            for number, (feed, answer) in enumerate(calls)
            for side, call in (("inputs", feed), ("outputs", answer))
            for name, x in call.items()
        }
        lines = [
            shlex.join(["call", str(number), "0.0", *(f"{n}:{bound:.3g}" for n, bound in self.bounds(answer).items())])
            for number, (_, answer) in enumerate(calls)
        ]
        run = shlex.join(self.subject.command())
        with staged_files(folder) as work:
            np.savez_compressed(work / CALLS, **arrays)  # type: ignore[arg-type]
            (work / LOADER).write_text(LOADER_TEXT, encoding="utf-8")
            left_out = f"# left out, since rounding may turn a choice: {', '.join(self.left_out)}\n" * bool(
                self.left_out
            )
            text = COMMAND_TEXT.format(loader=LOADER, run=run, calls="\n".join(lines), left_out=left_out)
            (work / COMMAND).write_text(text, encoding="utf-8")
        return shlex.join(["sh", str(folder / COMMAND)])


def remove_calls(folder: Path) -> None:
    """Remove what an earlier proof wrote for polygraphy."""
    for name in (CALLS, LOADER, COMMAND, "inputs.json", "outputs.json"):
        (folder / name).unlink(missing_ok=True)


def _largest(array: np.ndarray) -> float:
    finite = np.abs(array[np.isfinite(array)].astype(np.float64))
    return float(finite.max(initial=0))
