"""The native CPU kernel of ONNX packages: a custom op library, compiled at export, which the runner loads on machines like this one."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from pathlib import Path
from typing import Any

from still_export.export.plugins import SOURCE, PluginBuildError, op_list, run_cmake

LIBRARY = "libstill_onnxruntime.so"
HEADER = "onnxruntime_c_api.h"
INCLUDE_VARIABLE = "STILL_ONNXRUNTIME_INCLUDE"
USUAL_INCLUDES = tuple(
    f"{root}/include{tail}"
    for root in ("/usr", "/usr/local", "/opt/onnxruntime")
    for tail in ("/onnxruntime", "", "/onnxruntime/core/session")
)


def find_onnxruntime_headers(asked: Path | None = None) -> Path:
    """Folder of ONNX Runtime's C header: `asked`, or that of STILL_ONNXRUNTIME_INCLUDE, or the first usual place that has it.

    Raises:
        PluginBuildError: It is not there.
    """
    named = asked or os.environ.get(INCLUDE_VARIABLE)
    if named and not (Path(named) / HEADER).is_file():
        raise PluginBuildError(f"{named} has no {HEADER}. Give the folder of ONNX Runtime's C headers.")
    for folder in (named,) if named else USUAL_INCLUDES:
        if (Path(folder) / HEADER).is_file():
            return Path(folder)
    raise PluginBuildError(
        f"the native kernel needs {HEADER}, which no wheel of ONNX Runtime has. Install libonnxruntime-dev, or fetch the headers "
        "(python tools/get_ort_headers.py FOLDER) and give the folder with --onnxruntime-include."
    )


def build_native(build: Path, include: Path, ops: tuple[Path, ...] = ()) -> Path:
    """Compile the library for this kind of machine with CMake; `build` is kept, so that a second call compiles only what changed.

    Args:
        build: Build folder.
        include: Folder of ONNX Runtime's C header.
        ops: Folders of ops beside still-export's own.

    Raises:
        PluginBuildError: CMake, the compiler or the sources are missing, or the build fails; carries the tool's output.
    """
    options: dict[str, Path | str | None] = {"ONNXRUNTIME_INCLUDE_DIR": include, "STILL_OPS": op_list(ops)}
    return run_cmake(SOURCE, build, options, "still_onnxruntime") / "onnxruntime" / LIBRARY


def add_native(folder: Path, include: Path | None = None) -> dict[str, Any]:
    """Put the library into the package folder; the manifest's account of it.

    Raises:
        PluginBuildError: It cannot be built here.
    """
    if platform.system() != "Linux":
        raise PluginBuildError(
            f"the native kernel is built on Linux, not on {platform.system()}. Export without --native."
        )
    headers = find_onnxruntime_headers(include)
    with tempfile.TemporaryDirectory(
        prefix=".build.", dir=folder
    ) as build:  # goes with the folder where this process is killed
        shutil.copyfile(build_native(Path(build), headers), folder / LIBRARY)
    return {"library": LIBRARY, "system": platform.system(), "machine": platform.machine()}
