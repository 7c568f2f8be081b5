"""Liger-GLA: the mean of softmax over the latest tokens and of GLA whose gate is the key's projection.

Source: Liger, arXiv:2503.01496. Its pooling of the key's projection to the size that it has leaves it as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, pad, scaled_dot_product_attention

from still_export.mixers.base import LayerOp
from still_export.mixers.gated_linear_attention.module import LOGIT_NORMALIZER
from still_export.mixers.hybrid_attention.module import HybridOpModule
from still_export.mixers.linear_attention.recurrent import recurrent
from still_export.mixers.trainable import TrainableModule
from still_kernels.hybrid_attention import HybridAttentionConfig
from still_kernels.linear_attention import Inputs


class LigerGLA(HybridOpModule):
    """The projections of the module that it replaces, and nothing else; the heads of a group share their state.

    Args:
        base: The family's attention module; its submodules are taken over, not copied.
        window: The layer's softmax part: hybrid attention without linear terms.
        ops: Of the layer's other part.
    """

    def __init__(self, base: Any, window: HybridAttentionConfig, ops: Sequence[LayerOp]) -> None:
        super().__init__(base, window)
        self.ops = tuple(ops)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """The call of a transformers decoder layer. `attention_mask` is not used: the cache knows the rows' new tokens, and without a
        cache right padding comes after every real token."""
        query, key, value = self.heads(hidden_states)
        gated = self.gated(query, key, value, past_key_values)
        query, key = (x.to(value.dtype) for x in self.turned(query, key, position_embeddings))
        if past_key_values is None:
            window = windowed_attention(query, key, value, self.still.window)
        else:
            nothing = query.new_zeros(
                self.still.num_heads, 1, self.head_dim
            )  # features of the linear terms, of which there are none
            window = self.attend((query, key, value, None, nothing, nothing), past_key_values)
        return self.o_proj((0.5 * window + 0.5 * gated).flatten(2)), None

    def gated(self, query: Tensor, key: Tensor, value: Tensor, past_key_values: Any) -> Tensor:
        """GLA [B, T, H, D] of heads before RoPE; queries and keys are distributions over their channels."""
        given = op_inputs(query, key, value)
        with torch.autocast(value.device.type, enabled=False):  # the kernel chooses its own precision
            inputs = Inputs(**given, update_rule="gated", scale=1.0)  # type: ignore[arg-type]
            return recurrent(inputs, past_key_values, self.layer_idx, self.ops).flatten(2, 3)


def op_inputs(query: Tensor, key: Tensor, value: Tensor) -> dict[str, Tensor]:
    """Tensors of GLA's op of heads [.., h, D] before RoPE."""
    wide = torch.promote_types(value.dtype, torch.float32)
    decay = logsigmoid(key.to(wide)) / LOGIT_NORMALIZER
    query, key = (x.to(wide).softmax(-1).to(value.dtype) for x in (query, key))
    grouped = query.unflatten(-2, (value.shape[-2], -1))
    return {"query": grouped, "key": key, "value": value, "decay": decay}


class TrainableLigerGLA(TrainableModule, LigerGLA):
    """LigerGLA as teacher and student."""


def windowed_attention(query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
    """Softmax attention of query [B, T, H, D] to the `window` latest of key and value [B, T, HK, D], its own among them: [B, T, H, D]."""
    tokens, count = query.shape[1], -(-query.shape[1] // window)

    def blocks(x: Tensor) -> Tensor:
        """[B, T, h, D] as [B * blocks, h, window, D]."""
        x = pad(x, (0, 0, 0, 0, 0, count * window - tokens))
        return x.unflatten(1, (count, window)).flatten(0, 1).transpose(1, 2)

    def with_block_before(x: Tensor) -> Tensor:
        own = blocks(x).unflatten(0, (-1, count))
        return torch.cat((pad(own[:, :-1], (0, 0, 0, 0, 0, 0, 1, 0)), own), dim=3).flatten(0, 1)

    behind = torch.arange(window, device=query.device)[:, None] + window - torch.arange(2 * window, device=query.device)
    seen = (behind >= 0) & (behind < window)  # [window, 2 * window]
    first = seen & (behind <= torch.arange(window, device=query.device)[:, None])
    masks = torch.cat((first[None], seen.expand(count - 1, -1, -1))).repeat(len(query), 1, 1)[:, None]
    out = scaled_dot_product_attention(
        blocks(query),
        with_block_before(key),
        with_block_before(value),
        masks,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return out.transpose(1, 2).unflatten(0, (-1, count)).flatten(1, 2)[:, :tokens]
