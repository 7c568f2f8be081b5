"""The files of a package, checked: inside its folder, listed, unchanged.

Standard library only: exports copy this file into packages, for run_ort.py and run_trt.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from still_export.package.refusals import CheckError, RunError

MANIFEST = "manifest.json"
MODEL = "model.onnx"
DATA = "model.onnx.data"
ARCHIVE = "kernels.bin"
"""The compiled kernels of an engine's plugins."""
PORTABLE = "portable.onnx"
"""The graph that every target is lowered from; it uses the same weights."""
FOLD = "fold.onnx"
"""The graph that folds the accepted tokens of a call of guesses into the states; it uses the same weights."""
HEAD = "mtp.onnx"
"""The graph of an MTP head, which guesses tokens ahead; it uses the same weights."""
VISION = "vision.onnx"
"""The graph of the image encoder; its weights are in a file of their own."""
PLUGIN = "libstill_tensorrt"
"""Prefix of the names of plugin libraries."""
WEIGHTS_HASH = "still.portable"
RECORDED = {
    "still.capacity": "capacity",
    "still.quantization": "quantization",
    "still.origin": "origin",
    WEIGHTS_HASH: "portable",
}
"""Metadata entries of the graph, as JSON, and the manifest's fields they come from. The portable graph is written before its weights' hash
is known."""
COMPONENT = "component.json"
"""The package as a component of one of ONNX Runtime's model packages."""


_STAND_INS = (
    (
        rb"version https://git-lfs\.github\.com|# xet version|(/|\.git/|\.\./)*annex/objects/",
        "a Git LFS pointer, not the file itself: the repository was cloned without its large files. Run `git lfs install` and "
        "`git lfs pull` there, or fetch it with `hf download`",
    ),
    (
        rb"<(!doctype|html|head|\?xml|error)",
        "a web page (HTML or XML) that was saved in the place of the file, such as one for signing in. Fetch the file itself",
    ),
    (
        rb'\{\s*"(error|message)"\s*:|(Entry|Repository) not found|Invalid (username|credentials)|Access to (this )?model|Unauthorized',
        "an error message of a server that was saved in the place of the file. Fetch the file itself; gated models need `hf auth login`",
    ),
)
"""Beginnings of what is found in the place of a file, and what it is."""


def stand_in(path: Path) -> str:
    """What `path` holds instead of the file that its name promises, and what to do; "": nothing of the kind."""
    try:
        with path.open("rb") as file:
            return begins_another(file.read(1024))
    except OSError:  # its reader says so
        return ""


def begins_another(head: bytes) -> str:
    """As `stand_in`, for a file that begins with `head`."""
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    return next((what for begin, what in _STAND_INS if re.match(begin, text, re.IGNORECASE)), "")


def is_gguf(path: Path) -> bool:
    """Whether a file is one of GGUF, by the end of its name or its first bytes: blobs of Ollama have no such name."""
    if not path.is_file() or path.suffix.lower() == ".gguf":
        return path.is_file()
    with contextlib.suppress(OSError), path.open("rb") as file:
        return file.read(4) == b"GGUF"
    return False


def recorded_text(manifest: dict[str, Any], field: str) -> str:
    """A field of the manifest as the graph's metadata stores it."""
    return json.dumps(manifest.get(field), sort_keys=True)


def check_name(name: str, where: str) -> None:
    """Raise CheckError unless `name` is a plain relative path inside its folder."""
    parts = name.split("/")
    if not name or "\\" in name or "\0" in name or any(part in ("", ".", "..") for part in parts) or ":" in parts[0]:
        raise CheckError(f"{where} names {name!r}, which is no file inside the package.")


def inside(folder: Path, name: str) -> Path:
    """The path of the package's file `name`.

    Raises:
        CheckError: Its name or a symbolic link leads out of the folder. Links of Hugging Face's cache, from snapshots to blobs of the same
            repository, are allowed.
    """
    check_name(name, str(folder))
    path = folder
    for part in name.split("/"):
        path = path / part
        if path.is_symlink() and not _is_blob(folder, path):
            raise CheckError(
                f"{path} is a symbolic link, which may lead out of the package. Copy the package with its links followed (cp -rL)."
            )
    return path


def _is_blob(folder: Path, link: Path) -> bool:
    """Whether a link in REPOSITORY/snapshots/REVISION leads to a file in REPOSITORY/blobs."""
    snapshots = next((parent for parent in folder.absolute().parents if parent.name == "snapshots"), None)
    target = link.resolve()
    return snapshots is not None and target.parent == (snapshots.parent / "blobs").resolve() and target.is_file()


def listed(folder: Path, manifest: dict[str, Any], name: str) -> Path:
    """The path of the package's file `name`, which the manifest must list with its hash, and which must have its size.

    Raises:
        CheckError: It is not listed, missing, no plain file, or of another size.
    """
    path = inside(folder, name)
    entry = manifest["files"].get(name)
    if entry is None:
        raise CheckError(
            f"{path} is not listed in {MANIFEST}, so nothing says what it must be. Export the package again."
        )
    try:
        found = path.stat()
    except OSError as error:
        raise CheckError(
            f"{path} is missing, though the manifest lists it ({error.strerror}). {_again(folder, manifest, name)}"
        ) from error
    if not stat.S_ISREG(found.st_mode) or found.st_size != entry["size_bytes"]:
        raise _changed(path, "size", _again(folder, manifest, name))
    return path


def sha256(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def check_hash(folder: Path, manifest: dict[str, Any], name: str) -> Path:
    """Like `listed`, and the file must have the manifest's SHA-256."""
    path = listed(folder, manifest, name)
    if sha256(path) != manifest["files"][name]["sha256"]:
        raise _changed(path, "SHA-256", _again(folder, manifest, name))
    return path


def _changed(path: Path, what: str, again: str) -> CheckError:
    if instead := stand_in(path):
        return CheckError(f"{path} is {instead}.")
    return CheckError(f"{path} is not the file that was exported: its {what} differs from that in {MANIFEST}. {again}")


def _again(folder: Path, manifest: dict[str, Any], name: str) -> str:
    """Advice for a lost or damaged file: build engines again, export the rest again."""
    built = any(entry["file"] == name for entry in manifest.get("engines", []))
    return "Copy the package again, or " + (
        f"build it again: still-export build {folder}" if built else "export the model again."
    )


class OpenFiles:
    """Open files that a runtime has mapped: replacing one has no effect, and writing to one is detected."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._files = [path.open("rb", buffering=0) for path in paths]
        self._were = [_state(file) for file in self._files]

    def check(self) -> None:
        """Raise CheckError if a file was truncated or written."""
        for file, was in zip(self._files, self._were, strict=True):
            if _state(file) != was:
                raise CheckError(f"{file.name} was changed while it was used, so answers would be wrong. Start again.")


def _state(file: Any) -> tuple[int, int]:
    found = os.fstat(file.fileno())
    return found.st_size, found.st_mtime_ns


class Hashing:
    """Checks the hashes of large files in a thread while they load; `finish` waits for it.

    Args:
        folder, manifest: The package.
        names: Of its files, each checked to be listed at once.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any], names: Iterable[str]) -> None:
        self._error: Exception | None = None
        self._names = list(names)
        for name in self._names:
            listed(folder, manifest, name)
        self._thread = threading.Thread(target=self._run, args=(folder, manifest), daemon=True)
        self._thread.start()

    def _run(self, folder: Path, manifest: dict[str, Any]) -> None:
        try:
            for name in self._names:
                check_hash(folder, manifest, name)
        except (OSError, RunError) as error:
            self._error = error if isinstance(error, RunError) else CheckError(f"{folder}: {error}")

    def finish(self) -> None:
        """Raise CheckError if a file is not the exported one."""
        self._thread.join()
        if self._error is not None:
            raise self._error
