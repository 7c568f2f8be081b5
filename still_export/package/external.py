"""The files that an ONNX graph names: weights outside of it. Numbers of fields are those of onnx.proto.

Standard library only: exports copy this file into packages, for run_ort.py and run_trt.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from still_export.package.refusals import CheckError

_GRAPH: dict[int, Any] = {}
_TENSOR: dict[int, Any] = {13: "entry"}
_SPARSE = {1: _TENSOR, 2: _TENSOR}
_ATTRIBUTE = {5: _TENSOR, 6: _GRAPH, 10: _TENSOR, 11: _GRAPH, 22: _SPARSE, 23: _SPARSE}
_NODE = {5: _ATTRIBUTE}
_GRAPH.update({1: _NODE, 5: _TENSOR, 15: _SPARSE})
_MODEL = {7: _GRAPH, 20: {1: _GRAPH, 2: _GRAPH}, 25: {7: _NODE}}


def external_files(graph: bytes, source: str) -> set[str]:
    """Names of the files that hold weights of a serialized ONNX model.

    Raises:
        CheckError: The bytes are no such model.
    """
    found: set[str] = set()
    pending: list[tuple[Any, int, int]] = [(_MODEL, 0, len(graph))]
    try:
        while pending:
            kind, begin, end = pending.pop()
            if kind == "entry":
                pair = {number: graph[a:b] for number, a, b in _fields(graph, begin, end)}
                if pair.get(1) == b"location":
                    found.add(pair.get(2, b"").decode("utf-8"))
                continue
            for number, a, b in _fields(graph, begin, end):
                # Most of a model names no file: what lacks the word needs no look.
                if number in kind and graph.find(b"location", a, b) >= 0:
                    pending.append((kind[number], a, b))
    except (IndexError, ValueError) as error:
        raise CheckError(f"{source} is no ONNX model ({error}). Copy the package again.") from error
    return found


def listed_weights(graph: Path, manifest: dict[str, Any]) -> list[str]:
    """Names of the files that the graph in the file `graph` takes its weights from.

    Raises:
        CheckError: It is no graph, or names a file that the manifest does not list.
    """
    names = sorted(external_files(graph.read_bytes(), str(graph)))
    for name in names:
        if name not in manifest["files"]:
            raise CheckError(
                f"{graph} takes weights from {name!r}, which the manifest does not list. Export the package again."
            )
    return names


def _fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Number, begin and end of the fields of a message that have a length."""
    while at < end:
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 2:
            size, at = _varint(data, at)
            if at + size > end:
                raise ValueError("a field ends behind its message")
            yield key >> 3, at, at + size
            at += size
        elif kind == 0:
            _, at = _varint(data, at)
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        else:
            raise ValueError(f"wire type {kind}")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number is too long")
