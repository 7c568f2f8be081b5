"""Layers of type "linearized_gla" and "linearized_gdn", for the generic rooms."""

from __future__ import annotations

from typing import Any

from torch import nn

from still_export.mixers.base import LayerOp
from still_export.mixers.fixed import FixedStatesMixer
from still_export.mixers.layers import head_size
from still_export.mixers.linearized.fitted import TrainableGatedDeltaNet, TrainableGLA
from still_export.mixers.linearized.module import LinearizedAttention, LinearizedGatedDeltaNet, LinearizedGLA
from still_export.mixers.linearized.paged import PagedLinearized
from still_export.mixers.trainable import Trainable
from still_kernels.linear_attention.spec import LINEAR_ATTENTION


class LinearizedGLAMixer(FixedStatesMixer):
    name = "linearized_gla"
    of_families = False
    kind: type[LinearizedAttention] = LinearizedGLA
    trained: type[Any] = TrainableGLA

    def ops(self, config: Any, index: int) -> tuple[LayerOp, ...]:
        dim = head_size(config)
        sizes = {"H": config.num_attention_heads, "D": dim, "V": dim}
        return (LayerOp(LINEAR_ATTENTION, {"update_rule": self.kind.rule, "scale": 0.0}, sizes),)

    def module(self, base: nn.Module, config: Any, index: int) -> nn.Module:
        heads = config.num_attention_heads
        return self.kind(base, head_size(config), heads, config.hidden_size, self.ops(config, index))

    def trainable(self, module: Any, learn_window_factors: bool) -> Trainable:
        module.__class__ = self.trained  # wrapping would rename the parameters
        return module

    def paged(self, config: Any, index: int, ranks: int, rank: int) -> PagedLinearized:
        return PagedLinearized(
            self.kind, config.num_attention_heads, config.num_key_value_heads, head_size(config), ranks
        )


class LinearizedGatedDeltaNetMixer(LinearizedGLAMixer):
    name = "linearized_gdn"
    kind, trained = LinearizedGatedDeltaNet, TrainableGatedDeltaNet
