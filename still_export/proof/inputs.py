"""The inputs of a proof's reference, with hashes: a verdict is worth nothing without the files that it speaks of."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from still_export.errors import ConfigError
from still_export.package.files import sha256


@dataclass(frozen=True)
class Input:
    """A file or folder that the reference was read from.

    Args:
        role: "model", "overlay" or "adapter".
        named_by: "user" or "package": the package's manifest alone named it.
        sha256: Of a file; of a folder that of the lines `sha256sum` prints for its files, sorted by name.
    """

    role: str
    path: str
    sha256: str
    named_by: str

    def __str__(self) -> str:
        by = "" if self.named_by == "user" else ", which the package's manifest names"
        return f"{self.role}: {self.path}{', sha256 ' * bool(self.sha256)}{self.sha256}{by}"


def hash_of(path: Path) -> str:
    """SHA-256 of a file, or of a folder's `sha256sum` lines; hidden entries and folders in it do not count."""
    if path.is_file():
        return sha256(path)
    files = sorted(p for p in path.iterdir() if p.is_file() and not p.name.startswith("."))
    with ThreadPoolExecutor(2) as pool:
        lines = [f"{digest}  {p.name}\n" for p, digest in zip(files, pool.map(sha256, files), strict=True)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def inputs_of(model: Path, overlays: Iterable[Path], adapter: Path | None, named_by: str) -> list[Input]:
    """The inputs of a reference; `named_by` says who named model and overlays."""
    found = [("model", model, named_by), *(("overlay", path, named_by) for path in overlays)]
    found += [("adapter", adapter, "user")] if adapter is not None else []
    return [Input(role, str(path), hash_of(path), by) for role, path, by in found]


def check_named(model: str | None, overlays: tuple[str, ...], recorded: tuple[str, ...], package: Path) -> None:
    """Raise ConfigError if the user named the model, and not the overlays that the package was exported with."""
    if model is None and overlays:
        raise ConfigError("--overlay names an input of the model: name the model, too, with --model.")
    if model is not None and len(overlays) != len(recorded):
        wanted = " ".join(f"--overlay {name}" for name in recorded)
        raise ConfigError(
            f"{package} was exported with {len(recorded)} overlays ({', '.join(recorded) or 'none'}), and {len(overlays)} are named. With "
            f"--model every input is the one that you name. "
            + (
                f"If you trust {'it' if len(recorded) == 1 else 'them'}, add {wanted}"
                if recorded
                else "Leave --overlay out"
            )
            + ", or compare with another package."
        )
