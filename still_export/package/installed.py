"""The distribution still-export-kernels, where it is installed: a library of kernels that the user chose to install.

Standard library only: exports copy this file into packages.
"""

from __future__ import annotations

import json
import platform
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

KERNELS, MODULE = "still-export-kernels", "still_export_kernels"
BUILD = "build.json"


@dataclass(frozen=True)
class Kernels:
    """An installed library; the fields but `path` are those of the distribution's build.json."""

    path: Path
    version: str
    sha256: str
    machine: str
    sources: str
    ops: dict[str, int]


def installed_kernels(machine: str | None = None) -> Kernels | None:
    """What is installed of still-export-kernels for `machine` (None: this one's kind); None: nothing."""
    found = find_spec(MODULE)
    for place in (found and found.submodule_search_locations) or ():
        if (file := Path(place, BUILD)).is_file():
            build = json.loads(file.read_text(encoding="utf-8"))
            library = Path(place, build.pop("library"))
            kernels = Kernels(library, **build)
            return kernels if kernels.machine == (machine or platform.machine()) and library.is_file() else None
    return None


def kernels_for(manifest: dict[str, Any]) -> Kernels | None:
    """What is installed of still-export-kernels for this machine, if it has the package's ops in their versions; else None."""
    kernels = installed_kernels()
    wanted = manifest.get("ops") or {}
    return kernels if kernels and all(kernels.ops.get(name) == version for name, version in wanted.items()) else None
