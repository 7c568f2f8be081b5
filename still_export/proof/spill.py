"""Arrays that wait in a file without a name until somebody reads them: what is mapped counts as memory only where it was touched."""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
import tempfile

import numpy as np

from still_export.package.calls import Arrays


def give_back() -> None:
    """Let the system have memory that is free: of arrays smaller than 32 MB the C library keeps what held them, for those to come.
    Elsewhere than with glibc nothing happens."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


class Shelf:
    """Takes arrays out of calls and puts them back. The file lies where temporary files do (TMPDIR), for as long as an array of it is
    held."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()
        self._places: list[tuple[Arrays, str, int, np.dtype, tuple[int, ...]]] = []

    def take(self, calls: list[Arrays], end: str) -> None:
        """The arrays of `calls` whose names end so, equal ones once; not zeros."""
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

    def put_back(self) -> None:
        """All of them, where they were."""
        if not self._places:
            return
        self._file.flush()
        content = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_COPY)
        for call, name, place, kind, shape in self._places:
            call[name] = np.frombuffer(content, kind, math.prod(shape), place).reshape(shape)
        self._file.close()
