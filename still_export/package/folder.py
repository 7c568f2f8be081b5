"""The package folder that export writes and every later verb reads: files, manifest.json, their integrity."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from still_export.errors import PackageError
from still_export.package import staging

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
MODEL = "model.onnx"
BEFORE = "before"
"""Folder of what a build replaces, while it runs."""
UNLISTED = (MANIFEST, BEFORE, staging.ALIVE, "build.log", "engine.json", "timing.cache", "verify", "bench")
"""What verbs write into a package and may write again: not part of what a manifest vouches for."""

PLUGIN = "libstill_tensorrt"
"""How the names of plugin libraries begin."""

VERSIONED = ("still-export", "torch", "transformers", "onnx", "onnxscript", "onnxruntime", "triton", "tensorrt")


@dataclass(frozen=True)
class Package:
    """A package that was read: its folder and its manifest."""

    path: Path
    manifest: dict[str, Any]

    @property
    def model_path(self) -> Path:
        """The portable ONNX file."""
        return self.path / MODEL


@contextlib.contextmanager
def staged_folder(target: Path, force: bool = False) -> Iterator[Path]:
    """A new package folder that takes the place of `target` when the block ends, and vanishes if it fails (package/staging.py).

    Args:
        target: Where the folder goes.
        force: Replace the package that is there.

    Raises:
        PackageError: `target` exists without `force`, is no package, is written by another process, or the disk is full.
    """
    with staging.staged_folder(target, force, is_package, "exported package") as folder:
        yield folder


def is_package(folder: Path) -> bool:
    """Whether `folder` has a manifest of this project, damaged files or not."""
    try:
        return "format_version" in json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _sha256(file)


def _sha256(file: Any) -> str:  # Python 3.10
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def tool_versions() -> dict[str, str]:
    """Versions of Python and of the packages that shape an export, where installed."""
    found = {"python": platform.python_version()}
    for name in VERSIONED:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def is_unlisted(name: str) -> bool:
    """Whether an entry of a package folder is no part of what its manifest vouches for."""
    return name in UNLISTED or staging.is_staged(name) or (name.startswith(".") and name.endswith(".part"))


def write_manifest(folder: Path, content: dict[str, Any], known: dict[str, dict[str, Any]] | None = None) -> None:
    """Write manifest.json with `content`, the format version, tool versions, and size and hash of every file in `folder`.

    `known` holds the entries of files that did not change: they are kept, so that damage since does not pass for the original.
    """
    entries = known or {}
    files = {
        name: entries.get(name) or {"sha256": file_sha256(path), "size_bytes": path.stat().st_size}
        for path in sorted(folder.rglob("*"))
        for name in [str(path.relative_to(folder))]
        if path.is_file() and not is_unlisted(path.relative_to(folder).parts[0])
    }
    manifest = {"format_version": FORMAT_VERSION, **content, "versions": tool_versions(), "files": files}
    part = folder / f".{MANIFEST}.part"
    part.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    os.replace(part, folder / MANIFEST)


def open_package(path: Path, check_hashes: bool = True, check_engines: bool = True) -> Package:
    """Read the package at `path`.

    Args:
        path: The folder.
        check_hashes: Compare every file with its hash in the manifest.
        check_engines: Engines too must be there; a build makes them anew.

    Raises:
        PackageError: No package, a manifest of a newer format, a missing or changed file.
    """
    manifest_path = path / MANIFEST
    if not manifest_path.is_file():
        raise PackageError(
            f"{path} has no {MANIFEST}: it is no exported package. Make one with `still-export MODEL --to onnx -o {path}`."
        )
    try:
        manifest = json.loads(manifest_path.read_text(encoding="utf-8"))
        version = int(manifest["format_version"])
    except (ValueError, KeyError, TypeError) as error:
        raise PackageError(f"{manifest_path} is not readable ({error}). Export the model again.") from error
    if version > FORMAT_VERSION:
        raise PackageError(
            f"{manifest_path} has format version {version}; this still-export reads up to {FORMAT_VERSION}. Update still-export."
        )
    engines = {entry["file"] for entry in manifest.get("engines", [])}
    for name, entry in manifest.get("files", {}).items():
        file, again = path / name, "export the model again."
        if name in engines:
            if not check_engines:
                continue
            again = f"build it again: still-export build {path}"
        if not file.is_file():
            if name.startswith(PLUGIN):
                continue  # --plugin may name another, and whoever loads it says so
            raise PackageError(f"{file} is missing, though the manifest lists it. Copy the package again, or {again}")
        if file.stat().st_size != entry["size_bytes"] or (check_hashes and file_sha256(file) != entry["sha256"]):
            raise PackageError(
                f"{file} is not the file that was exported: its size or SHA-256 differs from the manifest. "
                f"Copy the package again, or {again}"
            )
    return Package(path, manifest)
