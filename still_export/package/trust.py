"""Native code runs with the user's rights, so only files on the user's own list are loaded.

Standard library only: exports copy this file into packages, for run_ort.py and run_trt.py.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from still_export.package.checked import read_manifest
from still_export.package.files import PLUGIN, check_hash, sha256
from still_export.package.installed import installed_kernels

_TRUSTED: set[str] = set()
"""SHA-256 of files trusted in this process, in case the list cannot be written."""


def home() -> Path:
    """The user's home; a path that cannot be written if the user has none."""
    try:
        return Path.home()
    except RuntimeError:  # a user id without an entry, as in containers
        return Path(os.devnull) / "no-home"


def trusted_list() -> Path:
    """The user's list of native files, by SHA-256: built on this machine, or loaded with --trust-native."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or home() / ".config") / "still-export" / "trusted-native"


def trusts(digest: str) -> bool:
    """Whether the user's list, this process, or the installed still-export-kernels has a file of this SHA-256."""
    kernels = installed_kernels()
    if digest in _TRUSTED or (kernels and kernels.sha256 == digest):
        return True
    try:
        lines = trusted_list().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return False
    return digest in {line.split(" ", 1)[0] for line in lines}


def trust(path: Path) -> None:
    """Add a native file to the user's list."""
    digest = sha256(path)
    if trusts(digest):
        return
    _TRUSTED.add(digest)
    target = trusted_list()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("a", encoding="utf-8") as file:
            file.write(f"{digest} {path.name}\n")
    except OSError as error:
        print(f"{target} cannot be written ({error.strerror}): {path.name} is trusted this time alone", file=sys.stderr)


def trust_package(folder: Path, engines: bool = True) -> None:
    """Add the package's native files to the user's list (kernels, plugin libraries, with `engines` engines), as --trust-native does.

    Raises:
        CheckError: One of them is not the file that was exported.
    """
    manifest = read_manifest(folder)
    names = [manifest["native"]["library"]] if manifest.get("native") else []
    names += [entry["file"] for entry in manifest.get("engines", []) if engines]
    names += [name for name in manifest["files"] if name.startswith(PLUGIN) and (folder / name).exists()]
    for name in names:
        trust(check_hash(folder, manifest, name))


def native_file(folder: Path, manifest: dict[str, Any], name: str) -> Path | None:
    """The path of a native file of the package, unchanged; None where the user's list does not have it.

    Raises:
        CheckError: It is not the file that was exported.
    """
    path = check_hash(folder, manifest, name)
    return path if trusts(manifest["files"][name]["sha256"]) else None


UNTRUSTED = (
    "was not built on this machine, and loading it runs its maker's code. --trust-native allows that, and remembers it"
)
"""Why a native file is not loaded."""
