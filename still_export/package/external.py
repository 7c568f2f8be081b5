"""External weight files and loops of an ONNX graph, read from the protobuf. Field numbers are those of onnx.proto.

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
MOST_TURNS = 1 << 24
"""Most turns of a loop; those of exports have a few hundred, or one for each of a tensor's numbers."""
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
        CheckError: It is no graph, has a loop without an end, or names a file that the manifest does not list.
    """
    content = graph.read_bytes()
    check_loops(content, str(graph))
    names = sorted(external_files(content, str(graph)))
    for name in names:
        if name not in manifest["files"]:
            raise CheckError(
                f"{graph} takes weights from {name!r}, which the manifest does not list. Export the package again."
            )
    return names


@functools.lru_cache(maxsize=4)
def check_loops(graph: bytes, source: str) -> None:
    """Check that loops end: each has a constant number of turns, or one for each number of a tensor, and none is inside another.

    Raises:
        CheckError: A loop may turn forever, which no signal would stop.
    """
    if b"Loop" not in graph:
        return
    try:
        for begin, end in _parts(graph, 0, len(graph), 7):
            _check_loops_of(graph, begin, end, (1, 5), source)
        for begin, end in _parts(graph, 0, len(graph), 25):
            _check_loops_of(graph, begin, end, (7, 0), source)
    except (IndexError, ValueError) as error:
        raise CheckError(f"{source} is no ONNX model ({error}). Copy the package again.") from error


def _check_loops_of(
    graph: bytes, begin: int, end: int, kinds: tuple[int, int], source: str, inside: bool = False
) -> None:
    """`kinds`: field numbers of a graph's, or a function's, nodes and initializers."""
    turns: dict[str, int] = {}
    loops: list[str] = []
    for number, a, b in _fields(graph, begin, end):
        if number == kinds[1]:
            name, value = _number(graph, a, b)
            turns[name] = value
        if number != kinds[0]:
            continue
        names: dict[int, list[str]] = {1: [], 2: [], 4: []}
        value = MOST_TURNS + 1
        for part, c, d in _fields(graph, a, b):
            if part in names:
                names[part].append(graph[c:d].decode("utf-8"))
        operator = "".join(names[4])
        for c, d in _parts(graph, a, b, 5):
            for part, x, y in _all_fields(graph, c, d):
                if part == 3:
                    value = x
                elif part == 5:
                    value = _number(graph, x, y)[1]
                elif part == 6:
                    _check_loops_of(graph, x, y, (1, 5), source, inside or operator == "Loop")
        if operator in ("Constant", "Size"):
            turns.update(dict.fromkeys(names[2], value if operator == "Constant" else 0))
        if operator == "Loop":
            loops.append(names[1][0] if names[1] else "")
    if any(turns.get(name, MOST_TURNS + 1) > MOST_TURNS for name in loops) or (loops and inside):
        raise CheckError(
            f"{source} has a loop that may turn more than {MOST_TURNS:,} times, which no export makes. Export the model again."
        )


def _number(graph: bytes, begin: int, end: int) -> tuple[str, int]:
    """Name and value of an integer tensor of one number; any other has too many turns."""
    name, value = "", MOST_TURNS + 1
    for number, a, b in _all_fields(graph, begin, end):
        if number == 8:
            name = graph[a:b].decode("utf-8")
        elif number == 9 and b - a in (4, 8):
            value = int.from_bytes(graph[a:b], "little")
        elif number in (5, 7):
            value = _varint(graph, a)[0] if b else a
    return name, value


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
