"""Errors that a package raises.

Standard library only: exports copy this file into packages, for run_ort.py and run_trt.py.
"""

from __future__ import annotations

import re

_HIDDEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Characters that move a terminal's cursor, change its colours, or turn the order of text; a file of a stranger may have them anywhere."""


def printable(text: str) -> str:
    """`text` with such characters as escapes."""
    return _HIDDEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def first_line(error: BaseException) -> str:
    """The first line of what an error says; its type if it says nothing."""
    said = str(error).strip()
    return said.splitlines()[0] if said else type(error).__name__


class RunError(ValueError):
    """The package cannot run this request; the message says why and what to do."""


class CheckError(RunError):
    """A file of the package is invalid; the message names the file and the field."""
