"""What still-export keeps for a user outside the folders that commands name: a list of it, and its removal."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from still_export.errors import ConfigError, unknown
from still_export.package.cache import cache_folder
from still_export.package.files import MANIFEST
from still_export.package.staging import is_staged, writer_lives
from still_export.package.trust import home, trusted_list
from still_export.targets.ort.headers import HEADERS, LIBRARIES

PACKAGES, KERNELS, MEASURED = "packages", "kernels", "linearize"
KINDS = {
    PACKAGES: "exported once from a GGUF file, for run, serve, bench and verify",
    KERNELS: "for CPUs; the next export builds them again",
    MEASURED: "measurements of base models, for the next linearize",
    "headers": "of ONNX Runtime, and links to its library, for kernels and C++ programs",
    "history": "messages typed in run --chat",
    "trust": "SHA-256 of native code that may be loaded: built here, or by --trust-native",
}
"""Names that `remove` accepts, with their meaning."""
_MADE = re.compile(r"(?:.+-)?[0-9a-f]{16}(?:\.lock)?|[0-9a-f]{32}\.json")
"""Names of folders and locks in the cache. Others are not ours: STILL_CACHE may name a folder with anything in it."""


@dataclass(frozen=True)
class Kept:
    """One thing on the disk.

    Attributes:
        kind: A name in KINDS. size_bytes: Of all its files. made_of: For packages, the GGUF file.
    """

    kind: str
    path: Path
    size_bytes: int
    made_of: str = ""

    @property
    def name(self) -> str:
        return self.path.name


def history_file() -> Path:
    """Messages typed in `run --chat`, for the line editor."""
    return Path(os.environ.get("XDG_STATE_HOME") or home() / ".local/state") / "still-export" / "chat-history"


def kept() -> list[Kept]:
    """Everything that is kept, by kind."""
    return [_kept(kind, path) for kind, path in _paths() if path.exists() or path.is_symlink()]


def remove(names: list[str]) -> list[Kept]:
    """Remove kinds, single packages by name, or "all"; what was removed.

    Raises:
        ConfigError: A name is unknown, or something cannot be removed.
    """
    found = kept()
    packages = [each.name for each in found if each.kind == PACKAGES]
    for name in names:
        if name not in (*KINDS, "all", *packages):
            raise unknown(name, ("all", *KINDS, *packages), f"--remove {name}")
    chosen = [
        each for each in found if {"all", each.kind} & set(names) or (each.kind == PACKAGES and each.name in names)
    ]
    for each in chosen:
        try:
            if each.path.is_dir() and not each.path.is_symlink():
                shutil.rmtree(each.path)
            else:
                each.path.unlink()
        except OSError as error:
            raise ConfigError(f"{each.path} cannot be removed: {error.strerror}.") from error
        with contextlib.suppress(OSError):  # not empty, or not ours
            each.path.parent.rmdir()
            each.path.parent.parent.rmdir()
    return chosen


def _paths() -> Iterator[tuple[str, Path]]:
    cache = cache_folder()
    for kind, name in ((PACKAGES, PACKAGES), (KERNELS, KERNELS), (MEASURED, MEASURED), ("headers", LIBRARIES)):
        for path in sorted((cache / name).glob("*")) if (cache / name).is_dir() else ():
            if _MADE.fullmatch(path.name) or (is_staged(path.name) and writer_lives(path) is False):
                yield kind, path
    yield from (("headers", cache / HEADERS), ("history", history_file()), ("trust", trusted_list()))


def _kept(kind: str, path: Path) -> Kept:
    files = [path] if not path.is_dir() else [each for each in path.rglob("*") if each.is_file()]
    made_of = ""
    if kind == PACKAGES:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
            made_of = str((manifest.get("config") or {}).get("model") or "")
    return Kept(kind, path, sum(each.lstat().st_size for each in files), made_of)
