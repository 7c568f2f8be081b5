"""Liger-GLA: the mean of softmax over the latest tokens and GLA with the key projection as gate.

Source: Liger, arXiv:2503.01496. Its pooling of the key projection keeps the size here, so it does nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from transformers.utils.generic import maybe_autocast

from still_export.mixers.base import LayerOp, Mixer
from still_export.mixers.fixed import WithFixedStates
from still_export.mixers.gated_linear_attention.mixer import LOGIT_NORMALIZER
from still_export.mixers.hybrid_attention.cache import HybridLayer
from still_export.mixers.hybrid_attention.window import WindowModule, window_of
from still_export.mixers.layers import head_size
from still_export.mixers.linear_attention.paged import PagedLinearAttention
from still_export.mixers.linear_attention.recurrent import recurrent
from still_export.mixers.paged import PagedProjection, PagedTokens, heads_of_rank
from still_export.mixers.trainable import TrainableModule
from still_kernels.hybrid_attention.config import HybridAttentionConfig
from still_kernels.hybrid_attention.meaning.state import HybridAttentionState
from still_kernels.hybrid_attention.spec import HYBRID_ATTENTION
from still_kernels.linear_attention.meaning import Inputs
from still_kernels.linear_attention.spec import LINEAR_ATTENTION


class WindowAndFixedStates(WithFixedStates[HybridAttentionState], HybridLayer):
    """Keys and values of the window, and the state of GLA."""


class LigerGLA(WindowModule):
    """Only the projections of the module that it replaces; the heads of a group share their state."""

    def __init__(self, base: Any, window: HybridAttentionConfig, ops: Sequence[LayerOp]) -> None:
        super().__init__(base, window)
        self.ops = tuple(ops)

    def mix(self, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor] | None, past_key_values: Any) -> Tensor:
        query, key, value = self.heads(hidden)
        gated = self.gated(query, key, value, past_key_values)
        query, key = (x.to(value.dtype) for x in self.turned(query, key, position_embeddings))
        window = self.windowed(query, key, value, past_key_values)
        return self.o_proj((0.5 * window + 0.5 * gated).flatten(2))

    def gated(self, query: Tensor, key: Tensor, value: Tensor, past_key_values: Any) -> Tensor:
        """GLA [B, T, H, D] from heads before RoPE; queries and keys are softmax-normalized over channels."""
        packed = op_inputs(query, key, value)
        with maybe_autocast(value.device.type, enabled=False):  # the kernel chooses its own precision
            inputs = Inputs(**packed, update_rule="gated", scale=1.0)  # type: ignore[arg-type]
            return recurrent(inputs, past_key_values, self.layer_idx, self.ops).flatten(2, 3)


def op_inputs(query: Tensor, key: Tensor, value: Tensor) -> dict[str, Tensor]:
    """Inputs of GLA's op from heads [.., h, D] before RoPE."""
    wide = torch.promote_types(value.dtype, torch.float32)
    decay = -softplus(-key.to(wide)) / LOGIT_NORMALIZER
    query, key = (x.to(wide).softmax(-1).to(value.dtype) for x in (query, key))
    grouped = query.unflatten(-2, (value.shape[-2], -1))
    return {"query": grouped, "key": key, "value": value, "decay": decay}


class TrainableLigerGLA(TrainableModule, LigerGLA):
    """LigerGLA as teacher and student."""


class PagedLigerGLA(PagedLinearAttention):
    """The heads of one rank: `heads` query heads, `kv_heads` states, `dim` channels."""

    projections: Mapping[str, PagedProjection] = {}
    head_weights: Mapping[str, tuple[int, ...]] = {}

    def __init__(self, heads: int, kv_heads: int, dim: int, window: int) -> None:
        super().__init__("gated", 1.0, kv_heads, heads // kv_heads, dim, per_key=True)
        self.window = window

    def inputs(self, packed: PagedTokens) -> dict[str, Tensor]:
        return op_inputs(*packed.heads)

    def result(self, output: Tensor, window: Tensor | None, packed: PagedTokens) -> Tensor:
        assert window is not None
        return 0.5 * window + 0.5 * output


WINDOW = 64
"""Tokens of softmax, as in Liger."""


class LigerGLAMixer(Mixer):
    name = "liger_gla"
    trained = TrainableLigerGLA

    def ops(self, config: Any, index: int) -> tuple[LayerOp, ...]:
        window = window_of(config, WINDOW)
        return LayerOp(HYBRID_ATTENTION, window.attributes(), window.symbols()), *self._fixed_ops(config)

    def cache_layer(self, config: Any, index: int) -> WindowAndFixedStates:
        return WindowAndFixedStates(self._fixed_ops(config), window_of(config, WINDOW))

    def module(self, base: nn.Module, config: Any, index: int) -> LigerGLA:
        return LigerGLA(base, window_of(config, WINDOW), self._fixed_ops(config))

    def paged(self, config: Any, index: int, ranks: int, rank: int) -> PagedLigerGLA:
        heads = heads_of_rank(config.num_attention_heads, config.num_key_value_heads, ranks)
        return PagedLigerGLA(*heads, head_size(config), WINDOW)

    def _fixed_ops(self, config: Any) -> tuple[LayerOp, ...]:
        dim = head_size(config)
        sizes = {"H": config.num_key_value_heads, "D": dim, "V": dim}
        return (LayerOp(LINEAR_ATTENTION, {"update_rule": "gated", "scale": 1.0}, sizes),)


MIXERS = (LigerGLAMixer(),)
