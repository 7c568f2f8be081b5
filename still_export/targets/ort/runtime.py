"""ONNX Runtime, as packages are run with it here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from still_export.package.files import MODEL
from still_export.runtime.base import Runner
from still_export.targets.runtime import Runtime


def open_ort(
    folder: Path, manifest: dict[str, Any], provider: str, threads: int, plugin: Path | None, check: bool
) -> Runner:
    """The runner of a package; raises RunError where it does not run here."""
    from still_export.runtime.ort import OrtModel

    return OrtModel(folder, threads, provider, check=check)


def repeat(folder: Path, manifest: dict[str, Any], provider: str, plugin: Path | None) -> list[str]:
    """Polygraphy's command. It loads no custom op library: it runs the bodies."""
    providers = ["--providers", "cuda"] if provider == "cuda" else []
    return ["polygraphy", "run", str(folder / MODEL), "--onnxrt", *providers]


ORT = Runtime("ort", "ONNX Runtime", open_ort, repeat, "onnxrt", modules=("onnxruntime",), providers=("cuda",))
