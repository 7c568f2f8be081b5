"""External weight files of an ONNX graph, read from the protobuf. Field numbers are those of onnx.proto.

Standard library only: exports copy this file into packages, for run_ort.py and run_trt.py.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from still_export.package.refusals import CheckError

_GRAPH: dict[int, Any] = {}
_TENSOR: dict[int, Any] = {13: "entry"}
_SPARSE = {1: _TENSOR, 2: _TENSOR}
_ATTRIBUTE = {5: _TENSOR, 6: _GRAPH, 10: _TENSOR, 11: _GRAPH, 22: _SPARSE, 23: _SPARSE}
_NODE = {5: _ATTRIBUTE}
_GRAPH.update({1: _NODE, 5: _TENSOR, 15: _SPARSE})
_INITIALIZERS = (7, 5)
_DIMS, _TYPE, _NAME, _EXTERNAL = 1, 2, 8, 13
_MODEL = {7: _GRAPH, 20: {1: _GRAPH, 2: _GRAPH}, 25: {7: _NODE}}


@functools.lru_cache(maxsize=4)  # called several times when a package opens
def external_files(graph: bytes, source: str) -> frozenset[str]:
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
                # Most of a model has no file name: parts without the word are skipped.
                if number in kind and graph.find(b"location", a, b) >= 0:
                    pending.append((kind[number], a, b))
    except (IndexError, ValueError) as error:
        raise CheckError(f"{source} is no ONNX model ({error}). Copy the package again.") from error
    return frozenset(found)


@dataclass(frozen=True)
class StoredTensor:
    """An initializer whose bytes are in a file."""

    name: str
    type: int
    """Of onnx.proto's TensorProto.DataType."""
    shape: tuple[int, ...]
    file: str
    offset: int
    size: int


def stored_tensors(graph: bytes, source: str) -> list[StoredTensor]:
    """The initializers of a serialized ONNX model that are stored in files.

    Raises:
        CheckError: The bytes are no such model.
    """
    found = []
    try:
        for begin, end in _parts(graph, 0, len(graph), *_INITIALIZERS):
            shape: list[int] = []
            entries: dict[str, str] = {}
            kind, name = 0, ""
            for number, value, stop in _all_fields(graph, begin, end):
                if number == _DIMS:
                    shape.append(value)
                elif number == _TYPE:
                    kind = value
                elif number == _NAME:
                    name = graph[value:stop].decode("utf-8")
                elif number == _EXTERNAL:
                    pair = {key: graph[a:b].decode("utf-8") for key, a, b in _fields(graph, value, stop)}
                    entries[pair.get(1, "")] = pair.get(2, "")
            if {"location", "offset", "length"} <= entries.keys():
                place = int(entries["offset"]), int(entries["length"])
                found.append(StoredTensor(name, kind, tuple(shape), entries["location"], *place))
    except (IndexError, ValueError) as error:
        raise CheckError(f"{source} is no ONNX model ({error}). Copy the package again.") from error
    return found


def listed_weights(graph: Path, manifest: dict[str, Any]) -> list[str]:
    """Names of the weight files of the graph `graph`.

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


def _parts(data: bytes, begin: int, end: int, *path: int) -> Iterator[tuple[int, int]]:
    """Begin and end of the messages at a path of field numbers."""
    if not path:
        yield begin, end
        return
    for number, a, b in _fields(data, begin, end):
        if number == path[0]:
            yield from _parts(data, a, b, *path[1:])


def _fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Number, begin and end of a message's length-delimited fields."""
    return (field for field in _all_fields(data, at, end) if field[2])


def _all_fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """The same for all fields; an integer field has its value as begin, and end 0."""
    while at < end:
        key, at = data[at], at + 1
        if key > 0x7F:
            key, at = _varint(data, at - 1)
        kind = key & 7
        if kind == 2:
            size, at = data[at], at + 1  # most are short, and a call for each would dominate
            if size > 0x7F:
                size, at = _varint(data, at - 1)
            if at + size > end:
                raise ValueError("a field ends behind its message")
            yield key >> 3, at, at + size
            at += size
        elif kind == 0:
            value, at = _varint(data, at)
            yield key >> 3, value, 0
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
