"""Prefixes that outlive the process: a folder of snapshots behind a prefix cache."""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import re
import sys
import threading
from pathlib import Path

import numpy as np

from still_export.errors import ConfigError
from still_export.runtime.base import Runner
from still_export.runtime.prefixes import Arrays, PrefixCache
from still_export.runtime.sampling import RunError
from still_export.runtime.snapshot import Snapshot, digest, sweep

WAITING = 8
"""Most states that wait to be written; an answer that adds one more waits."""

UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "kB": 10**3, "MB": 10**6, "GB": 10**9}


def open_prefixes(
    model: Runner, size: str | int, folder: Path | None = None, reproducible: bool = False
) -> PrefixCache | None:
    """Open a model's prefix cache; None if `size` is 0, or the model needs whole prompts or inserts tokens.

    Args:
        size: Bytes, or a text like "2GiB".
        folder: Prefixes are also written here, up to the size of the cache.
        reproducible: Use only prefixes that reproducible servers wrote.

    Raises:
        ConfigError: `size` is invalid (see `cache_bytes`), 0 with a folder, or the folder cannot be written.
    """
    most = cache_bytes(size)
    if most == 0:
        if folder is not None:
            raise ConfigError(
                f"--prefix-dir {folder}: the prefix cache has 0 bytes. Give it a size with --prefix-cache."
            )
        return None
    if model.feeding.every or model.feeding.whole_prompts:
        return None
    store = None
    if folder is not None:
        package = digest(model)
        own = hashlib.sha256(f"{package} reproducible".encode()).hexdigest() if reproducible else package
        store = PrefixFolder(folder, own, most)
    return PrefixCache(model.table, most, store)


def cache_bytes(size: str | int) -> int:
    """Bytes of `--prefix-cache`; raises ConfigError if it is no size, or exceeds this machine's memory."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKMG]i?B)?", str(size).strip())
    if found is None or (found[2] or "") not in UNITS:
        raise ConfigError(f"--prefix-cache {size!r} is no size: give bytes, or as 512MiB or 2GiB; 0 is none.")
    most = int(float(found[1]) * UNITS[found[2] or ""])
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if most > memory:
        raise ConfigError(
            f"--prefix-cache {size} is larger than this machine's {memory / 2**30:.1f} GiB of memory. Choose a smaller one."
        )
    return most


class PrefixFolder:
    """Snapshots with their tokens, one file each, written to a temporary name and then renamed.

    Files of other packages and adapters are left alone. A file whose content does not match its hash is not used.

    Args:
        folder: Created if missing.
        package: Digest of package and adapter.
        most_bytes: Of this package's files; the least recently used are deleted first.

    Raises:
        ConfigError: The folder cannot be written.
    """

    def __init__(self, folder: Path, package: str, most_bytes: int) -> None:
        self.folder, self.package, self.most_bytes = folder, package, most_bytes
        try:
            folder.mkdir(parents=True, exist_ok=True)
            sweep(folder, f"{package[:12]}-*")
            if not os.access(folder, os.W_OK):
                raise PermissionError(13, "no right to write there")
        except OSError as error:
            raise ConfigError(
                f"--prefix-dir {folder} cannot be written: {error.strerror}. Choose another folder."
            ) from error
        self._waiting: queue.Queue[Snapshot | None] = queue.Queue(WAITING)
        self._writer = threading.Thread(target=self._write, name="still-export prefixes", daemon=True)
        self._writer.start()

    def prefixes(self) -> list[np.ndarray]:
        """Tokens of all states in the folder."""
        found = []
        for path in self._files():
            try:
                described = Snapshot.describe(path)
            except RunError as error:
                self._complain(error)
                continue
            if described["package"] == self.package and described.get("tokens"):
                found.append(np.asarray(described["tokens"], np.int32))
        return found

    def read(self, tokens: np.ndarray) -> tuple[Arrays, int]:
        """(state after `tokens`, its length); raises RunError if the file is missing or damaged."""
        path = self._path(tokens)
        try:
            snapshot = Snapshot.load(path)
            if snapshot.package != self.package or list(snapshot.tokens) != tokens.tolist():
                raise RunError(f"{path} is of another package or text than its name says; it is not used.")
            self._used(path)
        except RunError as error:
            self._complain(error)
            raise
        return snapshot.arrays, snapshot.length

    def write(self, tokens: np.ndarray, state: Arrays, length: int) -> None:
        """Queue a state for writing; the caller must not change it."""
        self._waiting.put(Snapshot(dict(state), length, self.package, tokens=tuple(tokens.tolist())))

    def close(self) -> None:
        """Wait until all states are written."""
        self._waiting.put(None)
        self._writer.join()

    def _path(self, tokens: np.ndarray) -> Path:
        return self.folder / f"{self.package[:12]}-{hashlib.sha256(tokens.tobytes()).hexdigest()[:32]}.safetensors"

    def _files(self) -> dict[Path, os.stat_result]:
        """This package's files, the least recently used first. Other processes may write and remove some meanwhile."""
        found = dict[Path, os.stat_result]()
        for path in self.folder.glob(f"{self.package[:12]}-*.safetensors"):
            with contextlib.suppress(FileNotFoundError):
                found[path] = path.stat()
        return dict(sorted(found.items(), key=lambda item: item[1].st_mtime_ns))

    def _complain(self, error: RunError) -> None:
        if not isinstance(error.__cause__, FileNotFoundError):  # another process has evicted it
            print(error, file=sys.stderr)

    def _used(self, path: Path) -> None:
        """Make `path` the most recently used file, also after the system's clock was set back."""
        with contextlib.suppress(FileNotFoundError):
            os.utime(path)
            for last, found in list(self._files().items())[-1:]:
                if last != path:
                    os.utime(path, ns=(found.st_mtime_ns + 1,) * 2)

    def _write(self) -> None:
        while (snapshot := self._waiting.get()) is not None:
            try:
                path = self._path(np.asarray(snapshot.tokens, np.int32))
                snapshot.save(path)
                self._used(path)
                sizes = {file: found.st_size for file, found in self._files().items()}
                for file in list(sizes)[:-1]:
                    if sum(sizes.values()) > self.most_bytes:
                        file.unlink(missing_ok=True)
                        del sizes[file]
            except Exception as error:  # a full disk or lost rights: answers do not need it
                print(f"a prefix could not be written to {self.folder}: {error}", file=sys.stderr)
