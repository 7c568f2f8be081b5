"""Arrays in a zip file, each stored once under the hash of its content, with a JSON head that describes them. No torch."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from still_export.errors import PackageError
from still_export.package.calls import Arrays
from still_export.package.files import DATA, MODEL
from still_export.package.folder import Package

MOST_HEAD_BYTES = 64 << 20
"""Largest head; parsed JSON needs ten times as much memory. 1,000 calls of a model with 100 states need 10 MB."""

UNREADABLE = (
    OSError,
    EOFError,
    ValueError,
    KeyError,
    RecursionError,
    NotImplementedError,
    zipfile.BadZipFile,
    zlib.error,
)


class ArrayWriter:
    """Writes arrays to a file as they come, equal ones once. Only zeros are compressed: other numbers do not compress."""

    def __init__(self, file: zipfile.ZipFile) -> None:
        self._file, self.size_bytes = file, 0
        self._written: set[str] = set()
        self.seen: dict[int, tuple[np.ndarray, str]] = {}
        """Names of arrays already written, by their address."""

    def keep(self, array: np.ndarray) -> str:
        """Write an array and return its name."""
        if id(array) in self.seen:
            return self.seen[id(array)][1]
        content = np.ascontiguousarray(array)
        key = _name(content)
        self.seen[id(array)] = array, key
        if key not in self._written:
            self._written.add(key)
            _write(self._file, key, content, zipfile.ZIP_STORED if content.any() else zipfile.ZIP_DEFLATED)
            self.size_bytes += content.nbytes if content.any() else 0
        return key

    def keep_all(self, call: Arrays) -> dict[str, str]:
        """Names of the arrays of a call."""
        return {name: self.keep(array) for name, array in call.items()}

    def finish(self, kind: str, version: int, package: Package, content: dict[str, Any]) -> None:
        """Write the head, a member named `kind`, with `content` and the identity of `package`'s weights."""
        head = {"format": version, "weights": _weights(package), **content}
        text = json.dumps({**head, "digest": _digest(head)})
        _write(self._file, kind, np.frombuffer(text.encode(), np.uint8), zipfile.ZIP_DEFLATED)


@contextlib.contextmanager
def written_arrays(path: Path) -> Iterator[ArrayWriter]:
    """A writer whose file appears only once it is complete.

    Raises:
        PackageError: It cannot be written.
    """
    path = Path(os.path.realpath(path))  # what a link names is replaced, not the link
    staging = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(staging, "w") as file:
            yield ArrayWriter(file)
        os.replace(staging, path)
    except OSError as error:
        raise PackageError(f"cannot write {path}: {error.strerror}.") from error
    finally:
        staging.unlink(missing_ok=True)


class ArrayFile:
    """A file that ArrayWriter wrote, and its head.

    Args:
        holds: Its content, for messages.
        flag: The flag that writes it.

    Raises:
        PackageError: It is not readable, of another kind, format or package, or was changed; of arrays that is seen when they are read.
    """

    def __init__(self, path: Path, kind: str, version: int, package: Package, holds: str, flag: str) -> None:
        self._path, self._again = path, f"Record it again with {flag}."
        try:
            self._file = zipfile.ZipFile(path)
            head = json.loads(self._read(kind, MOST_HEAD_BYTES).tobytes())
            if not isinstance(head, dict):
                raise ValueError("its head is no object")
        except UNREADABLE as error:
            raise PackageError(f"{path} holds no {holds} ({error}). Make it with {flag}.") from error
        if head.get("format") != version:
            raise PackageError(
                f"{path} holds {holds} of format {head.get('format')}, this version reads format {version}. {self._again}"
            )
        if head.get("weights") != _weights(package):
            raise PackageError(f"{path} was recorded for other weights than those of {package.path}. {self._again}")
        if head.pop("digest", None) != _digest(head):
            raise PackageError(f"{path} was changed after it was recorded. {self._again}")
        self.head: dict[str, Any] = head

    def array(self, key: str) -> np.ndarray:
        """The array named `key`, which is the hash of its content.

        Raises:
            PackageError: It is another, or is gone.
        """
        try:
            found = self._read(key)
        except UNREADABLE as error:
            raise PackageError(f"{self._path} was changed after it was recorded: {error}. {self._again}") from error
        except MemoryError as error:
            raise PackageError(f"{self._path} has an array that this machine's memory cannot load: {error}.") from error
        if _name(np.ascontiguousarray(found)) != key:
            raise PackageError(
                f"{self._path} was changed after it was recorded: {key} holds something else. {self._again}"
            )
        return found

    def _read(self, key: str, most: float = math.inf) -> np.ndarray:
        """Read an array of at most `most` bytes, after comparing its header with its size."""
        member = self._file.getinfo(f"{key}.npy")
        if member.file_size > most:
            raise ValueError(f"{key} has {member.file_size:,} bytes; at most {most:,} are read")
        with self._file.open(member) as file:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(file)
            claimed, there = math.prod(shape) * dtype.itemsize, member.file_size - file.tell()
            if claimed != there:
                raise ValueError(
                    f"{key} claims {math.prod(shape):,} numbers, {claimed:,} bytes, and has {there:,} bytes"
                )
            file.seek(0)
            found: np.ndarray = np.lib.format.read_array(file, allow_pickle=False)
        return found


def _write(file: zipfile.ZipFile, name: str, array: np.ndarray, compression: int) -> None:
    """An array as NumPy's own archives have it."""
    member = zipfile.ZipInfo(f"{name}.npy")
    member.compress_type = compression
    with file.open(member, "w", force_zip64=True) as out:
        np.lib.format.write_array(out, array, allow_pickle=False)


def _name(content: np.ndarray) -> str:
    """Name of an array in the file: a hash of its content."""
    found = hashlib.sha256(f"{content.dtype}{content.shape}".encode())
    if content.size:
        found.update(content.reshape(-1).view(np.uint8).data)
    return found.hexdigest()[:24]


def _digest(head: dict[str, Any]) -> str:
    """Hash of the head, whose numbers are in no array."""
    return hashlib.sha256(json.dumps(head, sort_keys=True).encode()).hexdigest()


def _weights(package: Package) -> str:
    """Identity of the package's weights, the same for every target."""
    files = package.manifest["files"]
    return str(package.manifest.get("portable") or files.get(DATA, files[MODEL])["sha256"])
