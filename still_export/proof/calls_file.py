"""Calls as polygraphy's own command reads them: inputs.json and outputs.json, written as they come."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np

from still_export.proof.cases import Case
from still_export.proof.codes import in_codes
from still_export.proof.sessions import Target

CALLS = "calls"
"""Stands for the calls in what is written around them."""


class CallsFile(contextlib.AbstractContextManager["CallsFile"]):
    """Both files; polygraphy's own `save_json` holds all calls in memory, four times.

    Args:
        folder: Where they are written.
        target: What polygraphy repeats.
    """

    def __init__(self, folder: Path, target: Target) -> None:
        from polygraphy.comparator import RunResults
        from polygraphy.json import to_json

        self.target, self.count = target, 0
        around: dict[str, Any] = {"inputs": [CALLS], "outputs": RunResults([("pytorch", [CALLS])])}
        # `to_json` teaches the encoder NumPy's arrays, too.
        self.parts = {name: to_json(calls).split(f'"{CALLS}"') for name, calls in around.items()}
        self.files = {name: (folder / f"{name}.json").open("w", encoding="utf-8") for name in around}
        for name, file in self.files.items():
            file.write(self.parts[name][0])

    def add(self, case: Case) -> None:
        """Write the calls of a case. Words of codes are left out: what polygraphy would make of their differences says nothing."""
        from polygraphy.comparator import IterationResult
        from polygraphy.json.serde import Encoder
        from polygraphy.logger import G_LOGGER

        answers = [{name: x for name, x in out.items() if name not in in_codes(out)} for out in case.expected]
        feeds, expected = self.target.saved(case.feeds, answers)
        with G_LOGGER.verbosity(G_LOGGER.CRITICAL), np.errstate(invalid="ignore"):
            for feed, out in zip(feeds, expected, strict=True):
                for name, call in (("inputs", feed), ("outputs", IterationResult(out, runner_name="pytorch"))):
                    self.files[name].write(", " if self.count else "")
                    self.files[name].writelines(Encoder().iterencode(call))
                self.count += 1

    def __exit__(self, *_: object) -> None:
        for name, file in self.files.items():
            with file:
                file.write(self.parts[name][1])
