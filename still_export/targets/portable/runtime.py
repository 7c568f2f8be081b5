"""PyTorch, which runs any package: the reference with the package's weights."""

from __future__ import annotations

from still_export.runtime.base import Runner
from still_export.targets.ort.runtime import repeat
from still_export.targets.runtime import Opening, Runtime


def open_torch(asked: Opening) -> Runner:
    """As of Runtime: the model that was exported."""
    import torch

    from still_export.graph.options import ExportOptions
    from still_export.graph.quantization.read import held_model
    from still_export.runtime.torch import TorchModel

    if asked.threads:
        torch.set_num_threads(asked.threads)
    model = held_model(ExportOptions.from_manifest(asked.manifest), asked.folder, asked.manifest)
    return TorchModel(asked.manifest, model, asked.folder)


TORCH = Runtime("torch", "PyTorch's runner", open_torch, repeat, "torch")
