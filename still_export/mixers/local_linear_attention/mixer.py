"""Layers of type "local_linear_attention", for the generic rooms."""

from __future__ import annotations

from typing import Any

from torch import nn

from still_export.mixers.attention.mixer import KeysMixer, sizes
from still_export.mixers.base import LayerOp
from still_export.mixers.fixed import class_for
from still_export.mixers.layers import head_size
from still_export.mixers.local_linear_attention.module import MODULES, LocalLinearAttention
from still_graphs.ops.local_linear_attention import LOCAL_LINEAR_ATTENTION


class LocalLinearAttentionMixer(KeysMixer):
    """Layers of type "local_linear_attention"; a family's configuration has `ridge` and `ridge_steps`, 0 where keys are projected on."""

    name = "local_linear_attention"
    of_families = True
    as_numbers = "corrects values by keys, which are kept as numbers"

    def ops(self, config: Any, index: int) -> tuple[LayerOp, ...]:
        return (LayerOp(LOCAL_LINEAR_ATTENTION, {"ridge_steps": config.ridge_steps}, sizes(config)),)

    def made(self, base: nn.Module, config: Any, index: int) -> LocalLinearAttention:
        return class_for(base, MODULES, "local linear attention")(base, head_size(config))
