"""The model that export options, or a manifest, describe."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from still_export.folders.model import ModelFolder
from still_export.mixers.config import StillConfig
from still_export.models.load import Source, open_source, source_dtype


class ModelOptions(Protocol):
    """Which model, and how to read it; implemented by ExportOptions."""

    @property
    def model(self) -> str: ...
    @property
    def attach_untrained(self) -> bool: ...
    @property
    def dtype(self) -> str: ...
    @property
    def overlays(self) -> tuple[str, ...]: ...
    @property
    def revision(self) -> str | None: ...
    @property
    def vision(self) -> bool: ...

    def still_config(self) -> StillConfig | None:
        """The requested STILL configuration, or None."""

    def deployment(self) -> dict[str, Any]:
        """Deployment fields of the STILL configuration."""


def find_folder(options: ModelOptions) -> ModelFolder:
    """The files of the model of `options`, with its overlays."""
    return ModelFolder.open(options.model, options.revision, options.overlays)


def find_source(options: ModelOptions, folder: ModelFolder | None = None) -> Source:
    """The model of `options`, its weights unread; `folder`: its files, where they are open."""
    folder, dtype = folder or find_folder(options), options.dtype
    if dtype == "auto" and source_dtype(folder) == torch.bfloat16:
        # Most checkpoints are bfloat16, which ONNX Runtime's CPU provider lacks: the package would run almost nowhere.
        dtype = "float32"
    return open_source(
        folder,
        attach_untrained=options.attach_untrained,
        still_config=options.still_config(),
        deployment=options.deployment(),
        dtype=dtype,
        vision=options.vision,
    )
