"""The package folder that export writes and every later verb reads: files, manifest.json, their integrity."""

from __future__ import annotations

import contextlib
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
from still_export.package.checked import FORMAT_VERSION, read_manifest
from still_export.package.external import listed_weights
from still_export.package.files import MANIFEST, MODEL, PLUGIN, check_hash, inside, listed, sha256
from still_export.package.refusals import CheckError, RunError

BEFORE = "before"
"""Folder for the files that a build replaces, while it runs."""
UNLISTED = (MANIFEST, BEFORE, staging.ALIVE, "build.log", "engine.json", "timing.cache", "verify", "bench", "proofs")
"""Files that verbs write into a package and may replace; the manifest has no hashes of them."""

BESIDE = (".cache", ".git", ".gitattributes", "LICENSE", "README.md")
"""Entries that repositories add, and no program of a package reads."""

GENERATED = ("format_version", "versions", "files")
"""Members of a manifest that are generated at every change of the package."""

VERSIONED = ("still-export", "torch", "transformers", "onnx", "onnxscript", "onnxruntime", "triton", "tensorrt")


@dataclass(frozen=True)
class Package:
    path: Path
    manifest: dict[str, Any]

    @property
    def model_path(self) -> Path:
        return self.path / MODEL


@contextlib.contextmanager
def staged_folder(target: Path, force: bool = False) -> Iterator[Path]:
    """A new package folder that replaces `target` when the block ends, and is deleted if the block fails (package/staging.py).

    Raises:
        PackageError: `target` exists without `force`, is no package, is written by another process, or the disk is full.
    """
    with staging.staged_folder(target, force, is_package, "exported package") as folder:
        yield folder


def is_package(folder: Path) -> bool:
    """Whether `folder` has a manifest of this project; its files may be damaged."""
    try:
        return "format_version" in json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False


def tool_versions() -> dict[str, str]:
    """Versions of Python and of the packages that shape an export, where installed."""
    found = {"python": platform.python_version()}
    for name in VERSIONED:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def is_unlisted(name: str) -> bool:
    """Whether an entry of a package folder is outside its manifest."""
    return name in UNLISTED or staging.is_staged(name) or (name.startswith(".") and name.endswith(".part"))


def write_manifest(folder: Path, content: dict[str, Any], known: dict[str, dict[str, Any]] | None = None) -> None:
    """Write manifest.json with `content`, the format version, tool versions, and size and hash of every file in `folder`.

    `known`: entries of unchanged files. They are not computed again, so later damage is still detected.
    """
    entries = known or {}
    files = {
        name: entries.get(name) or {"sha256": sha256(path), "size_bytes": path.stat().st_size}
        for path in sorted(folder.rglob("*"))
        for name in [str(path.relative_to(folder))]
        if path.is_file() and not is_unlisted(path.relative_to(folder).parts[0])
    }
    manifest = {"format_version": FORMAT_VERSION, **content, "versions": tool_versions(), "files": files}
    part = folder / f".{MANIFEST}.part"
    part.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    os.replace(part, folder / MANIFEST)


def open_package(
    path: Path, check_hashes: bool = True, check_engines: bool = True, only_listed: bool = False
) -> Package:
    """Read the package at `path`.

    Args:
        check_hashes: Compare every file with its hash in the manifest.
        check_engines: Engines too must be there; a build makes them anew.
        only_listed: Refuse entries that the manifest does not list, and links.

    Raises:
        PackageError: No package, a manifest of a newer format, a missing or changed file.
    """
    manifest_path = path / MANIFEST
    if not manifest_path.is_file():
        raise PackageError(
            f"{path} has no {MANIFEST}: it is no exported package. Make one: still-export MODEL --to onnx -o PACKAGE"
        )
    with as_package_errors():
        manifest = read_manifest(path)
        engines = {entry["file"] for entry in manifest.get("engines", [])}
        for name in manifest["files"]:
            again = "export the model again."
            if name in engines:
                if not check_engines:
                    continue
                again = f"build it again: still-export build {path}"
            if not inside(path, name).exists() and name.startswith(PLUGIN):
                continue  # --plugin may name another file, which its loader reports
            try:
                (check_hash if check_hashes else listed)(path, manifest, name)
            except CheckError as error:
                raise PackageError(str(error).replace("export the model again.", again)) from error
        graph = listed(path, manifest, MODEL)
        for name in listed_weights(graph, manifest):
            listed(path, manifest, name)
        if only_listed:
            check_entries(path, manifest)
    return Package(path, manifest)


def check_entries(folder: Path, manifest: dict[str, Any]) -> None:
    """Raise CheckError for an entry that the manifest does not list: a program of the package might load it. Links are refused as in
    `inside`, also where a verb would write through them."""
    folders = {"/".join(name.split("/")[:n]) for name in manifest["files"] for n in range(1, name.count("/") + 1)}
    pending = [""]
    while pending:
        for entry in sorted(os.scandir(folder / pending.pop()), key=lambda entry: entry.name):
            name = Path(entry.path).relative_to(folder).as_posix()
            inside(folder, name)
            if name in manifest["files"] or (name.count("/") == 0 and (is_unlisted(name) or name in BESIDE)):
                continue
            if entry.is_dir(follow_symlinks=False) and entry.name == "__pycache__":
                raise CheckError(
                    f"{entry.path} holds compiled modules, which Python may run. Delete it: rm -r {entry.path}"
                )
            if name not in folders:
                raise CheckError(
                    f"{entry.path} is not listed in {MANIFEST}: nothing says what it is, and a program of the package may load it. "
                    "Delete it, or copy the package again."
                )
            pending.append(name)


@contextlib.contextmanager
def as_package_errors() -> Iterator[None]:
    """Turn runners' errors about a package into PackageError."""
    try:
        yield
    except RunError as error:
        raise PackageError(str(error)) from error
