"""ONNX Runtime, as packages are run with it here."""

from __future__ import annotations

from still_export.package.files import MODEL
from still_export.runtime.base import Runner
from still_export.targets.runtime import Opening, Runtime


def open_ort(asked: Opening) -> Runner:
    """As of Runtime."""
    from still_export.runtime.ort import OrtModel

    return OrtModel(asked.folder, asked.threads, asked.provider, check=asked.check)


def repeat(asked: Opening) -> list[str]:
    """Polygraphy's command. It loads no custom op library: it runs the bodies."""
    providers = ["--providers", "cuda"] if asked.provider == "cuda" else []
    return ["polygraphy", "run", str(asked.folder / MODEL), "--onnxrt", *providers]


ORT = Runtime("ort", "ONNX Runtime", open_ort, repeat, "onnxrt", modules=("onnxruntime",), providers=("cuda",))
