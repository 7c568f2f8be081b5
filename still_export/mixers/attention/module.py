"""SoftmaxAttention: attention that caches every key and value, over the op still::Attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from still_export.mixers.attention.cache import AttentionLayer
from still_export.mixers.cache_layer import layer_of
from still_export.mixers.cache_type import rounded
from still_export.mixers.projections import ProjectedAttention, needs_gradients
from still_kernels.attention.call import attention, attention_, fastest_attention
from still_kernels.attention.meaning import AttentionState, Inputs


class SoftmaxAttention(ProjectedAttention):
    """Causal softmax attention with the projections, and the norms of queries and keys, of the module that it replaces."""

    def mix(self, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor] | None, past_key_values: Any) -> Tensor:
        heads = self.project_heads(hidden, position_embeddings)
        return self.project_out(self.attend(*heads, past_key_values), hidden)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, past_key_values: Any) -> Tensor:
        """Attention [B, T, H, D] of new tokens to the cache and themselves; updates the cache."""
        key, value = rounded(key, self.cache), rounded(value, self.cache)
        if past_key_values is None:
            q, k, v = (x.transpose(1, 2) for x in (query, key, value))
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
        layer = layer_of(past_key_values, self.layer_idx, AttentionLayer, "is softmax attention")
        assert layer is not None and layer.new_tokens is not None
        if layer.fixed and torch.compiler.is_compiling():
            return attention_(query, key, value, layer.new_tokens, layer.length, layer.state)
        return self._update(Inputs(query, key, value, layer.new_tokens), layer)

    def _update(self, inputs: Inputs, layer: AttentionLayer) -> Tensor:
        query, traced = inputs.query, torch.compiler.is_compiling()
        if query.is_cuda and query.shape[1] == 1 and layer.owned and not (traced or needs_gradients(query)):
            step = layer.decode_step(inputs)
            if step is not None:
                assert inputs.new_tokens is not None and layer.length is not None
                output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
                step.run(output, query, inputs.key, inputs.value, inputs.new_tokens, layer.length)
                return output
        output, state = self._attend(inputs, layer.take(query.dtype, query.device), layer.owned)
        layer.store(state)
        return output

    def _attend(self, inputs: Inputs, state: AttentionState, in_place: bool) -> tuple[Tensor, AttentionState]:
        # The op is one node for export and has no derivative; training calls the kernel itself, which has one.
        training = needs_gradients(inputs.query) and not torch.compiler.is_exporting()
        if training or (in_place and not torch.compiler.is_compiling()):
            return fastest_attention(inputs, state, in_place=in_place and not training)
        return attention(inputs, state)
