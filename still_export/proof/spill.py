"""Arrays in temporary files until they are read: mapped memory counts only where it was touched."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np

from still_export.package.calls import Arrays


def free_memory() -> None:
    """Return freed memory to the system (glibc's malloc_trim; nothing elsewhere). The C library keeps freed arrays below 32 MB."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


LARGE = 16 << 20
"""Size from which an array is stored in a file."""


def room_for(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """An array of zeros. Large ones, such as logits of a large vocabulary, are in a temporary file, so that the system can page them
    out."""
    kind, count = np.dtype(dtype), math.prod(shape)
    if count * kind.itemsize < LARGE:
        return np.zeros(shape, kind)
    with tempfile.TemporaryFile() as file:
        if hasattr(os, "posix_fallocate"):  # a full disk is an error here; later it would be a signal
            os.posix_fallocate(file.fileno(), 0, count * kind.itemsize)
        else:
            file.truncate(count * kind.itemsize)
        content = mmap.mmap(file.fileno(), count * kind.itemsize)
    return np.frombuffer(content, kind).reshape(shape)


def rooms_for(shapes: Sequence[Sequence[int]], dtype: Any) -> list[np.ndarray]:
    """`room_for` for each shape, all in one file: every mapped file counts as an open file."""
    ends = np.cumsum([0, *map(math.prod, shapes)]).tolist()
    whole = room_for(ends[-1:], dtype)
    return [whole[ends[i] : ends[i + 1]].reshape(shape) for i, shape in enumerate(shapes)]


def joined(parts: Sequence[np.ndarray], axis: int) -> np.ndarray:
    """Concatenate `parts` along `axis` in memory of `room_for`."""
    shape = list(parts[0].shape)
    shape[axis] = sum(part.shape[axis] for part in parts)
    return np.concatenate(parts, axis, out=room_for(shape, parts[0].dtype))


class SpillFile:
    """Moves arrays of calls to a file and back. The file is in TMPDIR and is deleted with the last of its arrays."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()
        self._places: list[tuple[Arrays, str, int, np.dtype, tuple[int, ...]]] = []

    def take(self, calls: list[Arrays], end: str) -> None:
        """Move the arrays of `calls` whose names end with `end` to the file; equal ones are stored once, zeros never."""
        known: dict[int, tuple[int, np.ndarray]] = {}
        for call in calls:
            for name in [name for name in call if name.endswith(end)]:
                array = call[name]
                if id(array) not in known and not array.any():
                    continue
                if id(array) not in known:
                    known[id(array)] = self._file.tell(), array
                    self._file.write(np.ascontiguousarray(array).view(np.uint8).data)
                self._places.append((call, name, known[id(array)][0], array.dtype, array.shape))
                del call[name]

    def restore(self) -> None:
        """Put all arrays back."""
        if not self._places:
            return
        self._file.flush()
        content = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_COPY)
        for call, name, place, kind, shape in self._places:
            call[name] = np.frombuffer(content, kind, math.prod(shape), place).reshape(shape)
        self._file.close()
