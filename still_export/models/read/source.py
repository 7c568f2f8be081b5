"""The model that export options, or a manifest, describe."""

from __future__ import annotations

from typing import Any, Protocol

import torch

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


def find_source(options: ModelOptions) -> Source:
    """The model of `options`, its weights unread."""
    dtype = options.dtype
    if dtype == "auto" and source_dtype(options.model, options.revision) == torch.bfloat16:
        # Most checkpoints are bfloat16, which ONNX Runtime's CPU provider lacks: the package would run almost nowhere.
        dtype = "float32"
    return open_source(
        options.model,
        attach_untrained=options.attach_untrained,
        still_config=options.still_config(),
        deployment=options.deployment(),
        overlays=options.overlays,
        dtype=dtype,
        revision=options.revision,
        vision=options.vision,
    )
