"""PyTorch, which runs any package: the reference with the package's weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from still_export.runtime.base import Runner
from still_export.targets.ort.runtime import repeat
from still_export.targets.runtime import Runtime


def open_torch(
    folder: Path, manifest: dict[str, Any], provider: str, threads: int, plugin: Path | None, check: bool
) -> Runner:
    """The model that was exported, with the package's weights."""
    import torch

    from still_export.graph.options import ExportOptions
    from still_export.graph.quantization.read import held_model
    from still_export.runtime.torch import TorchModel

    if threads:
        torch.set_num_threads(threads)
    return TorchModel(manifest, held_model(ExportOptions.from_manifest(manifest), folder, manifest), folder)


TORCH = Runtime("torch", "PyTorch's runner", open_torch, repeat, "torch")
