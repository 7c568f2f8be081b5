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
_FIELDS = ("precompiled_charsmap", "continuing_subword_prefix", "merges", "vocab")
"""Fields that are checked before the library reads them."""
_ESCAPED = re.compile(rb"\\u00[4-7]")
"""Letters that are written as escapes, which nobody does and which may hide a field's name."""
_REPEATED = re.compile(r"\*|\+|\{\d+,\}")


def load_tokenizer(path: Path) -> Any:
    """Load and check a tokenizer.json; CheckError where it is damaged, or beyond the bounds."""
    from tokenizers import Tokenizer

    content = path.read_bytes()
    check_described(_described(content, str(path)), str(path))
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


def _described(content: bytes, source: str) -> Any:
    """What a file says, as the library reads it; None where the library says why not."""
    seldom = _ESCAPED.search(content) or any(content.count(f'"{name}"'.encode()) > 1 for name in _FIELDS)
    try:
        return json.loads(content, object_pairs_hook=_fields if seldom else None)
    except _RepeatedError as error:
        raise CheckError(f"{source}: {error} is there twice. Fetch the tokenizer again.") from None
    except (ValueError, RecursionError):
        return None


def check_described(described: Any, source: str) -> None:
    """Refuse what the library does not survive: damaged tables of characters, and merges that make no token."""
    if not isinstance(described, dict):
        return  # the library says why
    for found in _objects({name: part for name, part in described.items() if name != "model"}):
        text = found.get("precompiled_charsmap")
        if isinstance(text, str):
            _check_charsmap(text, source)
    model = described.get("model")
    if isinstance(model, dict) and isinstance(model.get("merges"), list) and isinstance(model.get("vocab"), dict):
        prefix = model.get("continuing_subword_prefix")
        _check_merges(model["merges"], model["vocab"], source, prefix if isinstance(prefix, str) else "")


class _RepeatedError(Exception):
    """A field that is there twice, of which the library may take the other one."""


def _fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        for name in _FIELDS:
            if names.count(name) > 1:
                raise _RepeatedError(name)
    return made


def _check_charsmap(text: str, source: str) -> None:
    """Refuse a table of characters whose size is wrong: the library reserves what it names."""
    try:
        table = base64.b64decode(text, validate=True)
    except ValueError:
        table = b""
    size = int.from_bytes(table[:4], "little")
    if len(table) < 4 or size % 4 or size > len(table) - 4:
        raise CheckError(f"{source}: a precompiled_charsmap is damaged. Fetch the tokenizer again.")


def _check_merges(merges: list[Any], vocabulary: dict[str, Any], source: str, prefix: str) -> None:
    """Refuse merges whose result is no token.

    The library counts on it, and cuts `prefix` off the right part without looking: it panics, or aborts in the middle of a character.
    """
    for merge in merges:
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
            continue  # the library says why
        left, right = pair
        if not right.startswith(prefix) or left + right[len(prefix) :] not in vocabulary:
            raise CheckError(
                f"{source}: the merge of {left!r} and {right!r} makes no token. Fetch the tokenizer again."
            )


def check_tokenizer(tokenizer: Any, source: str) -> None:
    """Check a loaded tokenizer, and switch padding and truncation off: a prompt is read as it is.

    Raises:
        CheckError: A text becomes many times longer, or an expression repeats what repeats, which can take for ever.
    """
    tokenizer.no_padding()
    tokenizer.no_truncation()
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
