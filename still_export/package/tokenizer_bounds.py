"""Bounds of what a stranger's tokenizer.json may do with a text. Standard library only: exports copy this file into packages."""

from __future__ import annotations

import base64
import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from still_export.package.refusals import CheckError, RunError

MOST_GROWTH = 64
"""Most characters that replacements may make of one, and characters before a text; published tokenizers write at most three bytes for a
blank."""
PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_CHARSMAP = re.compile(rb"recompiled|\\u00[4-7]")
"""Tables of characters, or letters that are written as escapes, which nobody does and which may hide one."""
_REPEATED = re.compile(r"\*|\+|\{\d+,\}")


def load_tokenizer(path: Path) -> Any:
    """Load and check a tokenizer.json; CheckError where it is damaged, or beyond the bounds."""
    from tokenizers import Tokenizer

    content = path.read_bytes()
    if _CHARSMAP.search(content):
        _check_charsmaps(content, str(path))
    with guarded(f"{path} is no tokenizer that can be read"):
        tokenizer = Tokenizer.from_buffer(content)
    check_tokenizer(tokenizer, str(path))
    return tokenizer


@contextlib.contextmanager
def guarded(what: str) -> Iterator[None]:
    """Errors of a tokenizer, among them the panics of its Rust side, as RunError; `what` begins its message."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise RunError(f"{what}: {' '.join(str(error).split())[:300]}.") from error


def _check_charsmaps(content: bytes, source: str) -> None:
    """Refuse tables of characters whose sizes are wrong: the library reserves what they name."""
    try:
        described = json.loads(content)
    except (ValueError, RecursionError):
        return  # the library says why
    for found in _objects(described):
        text = found.get("precompiled_charsmap")
        if not isinstance(text, str):
            continue
        try:
            table = base64.b64decode(text, validate=True)
        except ValueError:
            table = b""
        size = int.from_bytes(table[:4], "little")
        if len(table) < 4 or size % 4 or size > len(table) - 4:
            raise CheckError(f"{source}: a precompiled_charsmap is damaged. Fetch the tokenizer again.")


def check_tokenizer(tokenizer: Any, source: str) -> None:
    """Check a loaded tokenizer, and switch its padding off: a prompt is never padded.

    Raises:
        CheckError: A text becomes many times longer, or an expression repeats what repeats, which can take for ever.
    """
    tokenizer.no_padding()
    for name in PARTS:
        part = getattr(tokenizer, name)
        if part is None:
            continue
        try:
            described = json.loads(part.__getstate__())
        except (AttributeError, TypeError, ValueError, RecursionError):  # a part that is no data, which no file gives
            continue
        growth = 1.0
        for found in _objects(described):
            pattern = found.get("pattern")
            expression = pattern.get("Regex") if isinstance(pattern, dict) else None
            if isinstance(expression, str) and repeats_repetitions(expression):
                raise CheckError(
                    f"{source}: the {name} has the expression {expression!r:.80}, which repeats a repetition: reading a text by it may "
                    "take for ever. Use a tokenizer without it."
                )
            if isinstance(found.get("content"), str) and isinstance(pattern, dict):
                replaced = pattern.get("String") if isinstance(pattern.get("String"), str) else ""
                growth *= max(1.0, len(found["content"]) / max(1, len(replaced or "")))
            if isinstance(found.get("single"), list):  # of a template: the text may come in it again and again
                growth *= max(1, sum("Sequence" in piece for piece in found["single"] if isinstance(piece, dict)))
            if isinstance(found.get("prepend"), str):
                growth = max(growth, len(found["prepend"]))
        if growth > MOST_GROWTH:
            raise CheckError(
                f"{source}: the {name} makes a text up to {growth:.3g} times longer; the limit is {MOST_GROWTH}. Use another tokenizer."
            )


def repeats_repetitions(expression: str) -> bool:
    """Whether an unbounded repetition holds another one, as in `(a+)+`, whose search may double with each character."""
    open_groups, closed, at = [False], False, 0
    while at < len(expression):
        character = expression[at]
        repeated = _REPEATED.match(expression, at)
        if character == "\\":
            at, closed = at + 2, False
            continue
        if character == "[":
            at, closed = _class_end(expression, at), False
            continue
        if character == "(":
            open_groups.append(False)
            closed = False
        elif character == ")" and len(open_groups) > 1:
            closed = open_groups.pop()
            open_groups[-1] |= closed
            at += 1
            if closed and _REPEATED.match(expression, at):
                return True
            continue
        elif repeated:
            open_groups[-1] = True
            at = repeated.end()
            continue
        at += 1
    return False


def _class_end(expression: str, at: int) -> int:
    """The place after a class of characters that begins at `at`."""
    depth = 0
    while at < len(expression):
        if expression[at] == "\\":
            at += 1
        elif expression[at] == "[":
            depth += 1
        elif expression[at] == "]":
            depth -= 1
            if not depth:
                return at + 1
        at += 1
    return at


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """All objects within a value of JSON."""
    pending = [value]
    while pending:
        one = pending.pop()
        if isinstance(one, dict):
            yield one
            pending += one.values()
        elif isinstance(one, list):
            pending += one
