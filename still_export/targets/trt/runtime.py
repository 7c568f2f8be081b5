"""TensorRT, as packages are run with it here."""

from __future__ import annotations

from still_export.runtime.base import Runner
from still_export.targets.runtime import Opening, Runtime


def open_trt(asked: Opening) -> Runner:
    """As of Runtime; the engine was built."""
    from still_export.runtime.tensorrt import TrtModel

    return TrtModel(asked.folder, asked.plugin)


def repeat(asked: Opening) -> list[str]:
    """Polygraphy's command."""
    entry = asked.manifest["engines"][0]
    library = asked.plugin or asked.folder / asked.manifest["plugins"][entry["tensorrt"].split(".")[0]]
    # Polygraphy only opens libraries: the variant that registers itself.
    itself = library.with_name(f"{library.stem.removesuffix('_static')}_static.so")
    engine = ["polygraphy", "run", str(asked.folder / entry["file"]), "--model-type", "engine", "--trt"]
    return [*engine, "--plugins", str(itself)]


TENSORRT = Runtime("trt", "TensorRT", open_trt, repeat, "trt", engines=True)
