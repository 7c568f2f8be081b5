"""The files of polygraphy's own command, inputs.json and outputs.json, written as calls come."""

from __future__ import annotations

import base64
import contextlib
import io
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np

from still_export.package.calls import Arrays
from still_export.proof.cases import Case
from still_export.proof.codes import in_codes
from still_export.proof.sessions import Subject

CALLS = "calls"
"""Placeholder for the calls in the JSON around them."""
PART = 3 << 20
"""Bytes encoded at once; a multiple of three, which base64 turns into four letters."""


class CallsFile(contextlib.AbstractContextManager["CallsFile"]):
    """Writes both files. polygraphy's own `save_json` needs four times the memory of all calls."""

    def __init__(self, folder: Path, subject: Subject) -> None:
        from polygraphy.comparator import RunResults
        from polygraphy.json import to_json

        self.subject, self.count = subject, 0
        around: dict[str, Any] = {"inputs": [CALLS], "outputs": RunResults([("pytorch", [CALLS])])}
        # `to_json` also registers the encoder for NumPy arrays.
        self.parts = {name: to_json(calls).split(f'"{CALLS}"') for name, calls in around.items()}
        self.files = {name: (folder / f"{name}.json").open("wb") for name in around}
        for name, file in self.files.items():
            file.write(self.parts[name][0].encode())

    def add(self, case: Case) -> None:
        """Write the calls of a case. Packed 8-bit states are left out, because differences of their words mean nothing."""
        from polygraphy.comparator import IterationResult

        answers = [{name: x for name, x in out.items() if name not in in_codes(out)} for out in case.expected]
        for feed, out in zip(*self.subject.saved(case.feeds, answers), strict=True):
            for file in self.files.values():
                file.write(b", " if self.count else b"")
            _write(self.files["inputs"], feed, dict)
            _write(self.files["outputs"], out, partial(IterationResult, runner_name="pytorch"))
            self.count += 1

    def __exit__(self, *_: object) -> None:
        for name, file in self.files.items():
            with file:
                file.write(self.parts[name][1].encode())


def _write(file: IO[bytes], call: Arrays, kind: Callable[[Arrays], Any]) -> None:
    """Write a call in polygraphy's format."""
    # Its encoder is slow with large arrays, so it encodes placeholders, which are replaced here.
    from polygraphy.json import to_json

    stand_ins = {name: np.array(number) for number, name in enumerate(call)}
    text = to_json(kind(stand_ins)).encode()
    for name, array in call.items():
        before, text = text.split(b"".join(_base64(stand_ins[name])), 1)
        file.write(before)
        file.writelines(_base64(array))
    file.write(text)


def _base64(array: np.ndarray) -> Iterator[bytes]:
    """Of the array as a file of NumPy's."""
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, np.lib.format.header_data_from_array_1_0(array))
    content, start = np.ascontiguousarray(array).reshape(-1).view(np.uint8), -len(head.getvalue()) % 3
    yield base64.b64encode(head.getvalue() + content[:start].tobytes())
    for part in range(start, len(content), PART):
        yield base64.b64encode(content[part : part + PART].data)
