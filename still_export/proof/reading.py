"""A model as another program reads it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOM = 0.5
"""Share of the free memory for another program's model."""


@dataclass(frozen=True)
class Reading:
    """A model as another program reads it.

    Args:
        by: Name of the program.
        read: Name of the program that read the tensors; "": the same.
        tensors: Float tensors by the program's names.
        logits: Logits [T, V] for tokens [1, T]; None: it cannot compute them.
        merged: Adapters are merged into the tensors.
        why: Lines on what it cannot do or left out.
    """

    by: str
    tensors: Mapping[str, Tensor]
    logits: Callable[[Tensor], Tensor] | None = None
    merged: bool = False
    why: list[str] = field(default_factory=list)
    read: str = ""


def logits_of(model: Any) -> Callable[[Tensor], Tensor]:
    """Logits [T, V] of a transformers model for tokens [1, T]."""
    if hasattr(model.config, "_experts_implementation"):
        model.config._experts_implementation = "eager"  # the others require certain multiples as sizes
    for module in model.modules():
        if hasattr(module, "time_step_limit") and hasattr(model.config, "time_step_limit"):
            module.time_step_limit = tuple(
                model.config.time_step_limit
            )  # Nemotron-H's is another in transformers (#48989)
        if getattr(module, "config", None) is not None:
            module.config.return_dict = True  # whatever config.json says: layers read the fields of what others return

    def logits(ids: Tensor) -> Tensor:
        with torch.inference_mode():
            found: Tensor = model(input_ids=ids, use_cache=False).logits[0].float()
            return found

    return logits


def too_large(parameters: int) -> str:
    """Why a float32 model of this size is not read; "": it fits."""
    size, free = 4 * parameters, _free_memory()
    if size <= ROOM * free:
        return ""
    return f"transformers' model takes {size / 2**30:.1f} GB, more than half of the {free / 2**30:.1f} that are free"


def room() -> int:
    """Largest size of a model, bytes."""
    return int(min(ROOM * _free_memory(), 1 << 62))


def _free_memory() -> float:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return math.inf
