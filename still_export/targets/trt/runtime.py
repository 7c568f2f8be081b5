"""TensorRT, as packages are run with it here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from still_export.runtime.base import Runner
from still_export.targets.runtime import Runtime


def open_trt(
    folder: Path, manifest: dict[str, Any], provider: str, threads: int, plugin: Path | None, check: bool
) -> Runner:
    """The runner of a package whose engine was built; raises RunError where it does not run here."""
    from still_export.runtime.tensorrt import TrtModel

    return TrtModel(folder, plugin)


def repeat(folder: Path, manifest: dict[str, Any], provider: str, plugin: Path | None) -> list[str]:
    """Polygraphy's command."""
    entry = manifest["engines"][0]
    library = plugin or folder / manifest["plugins"][entry["tensorrt"].split(".")[0]]
    # Polygraphy only opens libraries: the variant that registers itself.
    itself = library.with_name(f"{library.stem.removesuffix('_static')}_static.so")
    engine = ["polygraphy", "run", str(folder / entry["file"]), "--model-type", "engine", "--trt"]
    return [*engine, "--plugins", str(itself)]


TENSORRT = Runtime("trt", "TensorRT", open_trt, repeat, "trt", engines=True)
