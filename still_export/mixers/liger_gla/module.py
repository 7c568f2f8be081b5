"""Liger-GLA: the mean of softmax over the latest tokens and of GLA whose gate is the key's projection.

Source: Liger, arXiv:2503.01496. Its pooling of the key's projection to the size that it has leaves it as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus
from transformers.utils.generic import maybe_autocast

from still_export.mixers.base import LayerOp
from still_export.mixers.gated_linear_attention.mixer import LOGIT_NORMALIZER
from still_export.mixers.hybrid_attention.window import WindowModule
from still_export.mixers.linear_attention.recurrent import recurrent
from still_export.mixers.trainable import TrainableModule
from still_kernels.hybrid_attention import HybridAttentionConfig
from still_kernels.linear_attention import Inputs


class LigerGLA(WindowModule):
    """The projections of the module that it replaces, and nothing else; the heads of a group share their state.

    Args:
        base: The family's attention module; its submodules are taken over, not copied.
        window: The layer's softmax part.
        ops: Of the layer's other part.
    """

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
        """GLA [B, T, H, D] of heads before RoPE; queries and keys are distributions over their channels."""
        given = op_inputs(query, key, value)
        with maybe_autocast(value.device.type, enabled=False):  # the kernel chooses its own precision
            inputs = Inputs(**given, update_rule="gated", scale=1.0)  # type: ignore[arg-type]
            return recurrent(inputs, past_key_values, self.layer_idx, self.ops).flatten(2, 3)


def op_inputs(query: Tensor, key: Tensor, value: Tensor) -> dict[str, Tensor]:
    """Tensors of GLA's op of heads [.., h, D] before RoPE."""
    wide = torch.promote_types(value.dtype, torch.float32)
    decay = -softplus(-key.to(wide)) / LOGIT_NORMALIZER
    query, key = (x.to(wide).softmax(-1).to(value.dtype) for x in (query, key))
    grouped = query.unflatten(-2, (value.shape[-2], -1))
    return {"query": grouped, "key": key, "value": value, "decay": decay}


class TrainableLigerGLA(TrainableModule, LigerGLA):
    """LigerGLA as teacher and student."""
