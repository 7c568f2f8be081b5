"""The mixer of layers of type "parallel_mamba2"."""

from __future__ import annotations

from typing import Any

from torch import nn

from still_export.mixers.attention.cache import AttentionLayer
from still_export.mixers.attention.mixer import AttentionMixer
from still_export.mixers.base import LayerOp, Mixer
from still_export.mixers.fixed import WithFixedStates
from still_export.mixers.layers import head_size
from still_export.mixers.mamba2.mixer import Mamba2Mixer
from still_kernels.attention.meaning import AttentionState


class AttentionAndFixedStates(WithFixedStates[AttentionState], AttentionLayer):
    """Keys and values, and the states of the other ops."""


class ParallelMamba2Mixer(Mixer):
    """Layers of type "parallel_mamba2": softmax attention and Mamba-2 in one layer, which adds their outputs (Falcon-H1)
    or has one read the other's (Zamba2)."""

    name = "parallel_mamba2"
    of_families = True
    mamba2, attention = Mamba2Mixer(), AttentionMixer()

    def ops(self, config: Any, index: int) -> tuple[LayerOp, ...]:
        return *self.mamba2.ops(config, index), *self.attention.ops(config, index)

    def cache_layer(self, config: Any, index: int) -> AttentionAndFixedStates:
        ops = self.mamba2.ops(config, index)
        return AttentionAndFixedStates(
            ops, config.num_key_value_heads, head_size(config), config.still.deployment.cache
        )

    def module(self, base: nn.Module, config: Any, index: int) -> nn.Module:
        """The module that replaces `base`, one of the layer's two."""
        mixer = self.attention if hasattr(base, "q_proj") else self.mamba2
        return mixer.module(base, config, index)
