"""StillAttention replaces a family's self-attention module and uses its projections."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from still_export.mixers.cache_layer import layer_of
from still_export.mixers.cache_type import rounded
from still_export.mixers.hybrid_attention.cache import HybridLayer
from still_export.mixers.projections import ProjectedAttention, needs_gradients
from still_export.mixers.roles import FEATURE_MAP, GATE
from still_kernels.hybrid_attention.call import hybrid_attention as kernel
from still_kernels.hybrid_attention.config import HybridAttentionConfig
from still_kernels.hybrid_attention.meaning.chunked import chunked_hybrid_attention
from still_kernels.hybrid_attention.meaning.inputs import Inputs
from still_kernels.hybrid_attention.meaning.selection import Watch
from still_kernels.hybrid_attention.meaning.state import HybridAttentionState
from still_kernels.hybrid_attention.traced import hybrid_attention, hybrid_attention_

OPEN_GATE_BIAS = 8.0
"""Bias of fresh gates: sigmoid(8) = 0.9997, so untrained linear terms count almost fully and the gate still has a gradient."""


class HybridOpModule(ProjectedAttention):
    """Calls still::HybridAttention on a cache's state."""

    def __init__(self, base: Any, config: HybridAttentionConfig) -> None:
        super().__init__(base, config.head_dim)
        self.still = config
        self.watch: Watch | None = None
        """Called with a call's selection; may replace it."""

    @property
    def selects(self) -> bool:
        return self.still.salient_per_chunk > 0

    @property
    def constants(self) -> dict[str, Sequence[float]]:
        """Inputs of the op that are configuration constants [H], by name; they differ between layers of a kind."""
        factor = self.still.window_factor
        return {} if factor is None else {"window_factor": factor}

    def attend(self, tensors: Sequence[Tensor | None], past_key_values: Any) -> Tensor:
        """Attention [B, T, H, D] of new tokens to themselves and the cache, which is updated.

        Args:
            tensors: Query, key and value after norm and RoPE, gate or None, the two feature weights.
            past_key_values: A StillCache, or None: sequences are new, and no state is stored.
        """
        query = tensors[0]
        assert query is not None
        if past_key_values is None:
            batch, tokens = query.shape[:2]
            slots = self.still.slots_for(tokens) if self.still.overflow == "error" else self.still.capacity_slots
            state = HybridAttentionState.empty(self.still, batch, query.dtype, query.device, slots=slots)
            new_tokens = torch.full((batch,), tokens, dtype=torch.int64, device=query.device)
            return self._call(Inputs(*tensors, new_tokens), state, False)[0]  # type: ignore[arg-type, call-arg]
        layer = layer_of(past_key_values, self.layer_idx, HybridLayer, "is hybrid attention")
        assert layer is not None and layer.new_tokens is not None
        if layer.fixed and torch.compiler.is_compiling():
            return hybrid_attention_((*tensors, layer.factor), layer.new_tokens, layer.length, layer.state, self.still)
        return self._update(Inputs(*tensors, layer.new_tokens), layer)  # type: ignore[arg-type, call-arg]

    def _update(self, inputs: Inputs, layer: HybridLayer) -> Tensor:
        query, traced = inputs.query, torch.compiler.is_compiling()
        if query.is_cuda and query.shape[1] == 1 and layer.owned and not (traced or needs_gradients(query)):
            step = layer.decode_step(inputs)
            if step is not None:
                assert inputs.new_tokens is not None and layer.length is not None
                gate = () if inputs.gate is None else (inputs.gate,)
                weights = (inputs.feature_q_weight, inputs.feature_k_weight)
                output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
                step.run(output, query, inputs.key, inputs.value, *gate, *weights, inputs.new_tokens, layer.length)
                return output
        output, state = self._call(inputs, layer.take(query.dtype, query.device), layer.owned)
        layer.store(state)
        return output

    def _call(self, inputs: Inputs, state: HybridAttentionState, in_place: bool) -> tuple[Tensor, HybridAttentionState]:
        # The op is one node for export and has no derivative; training calls the kernel itself, which has one.
        if self.watch is not None:
            inputs = replace(inputs, window_factor=inputs.factor(self.still))
            return chunked_hybrid_attention(inputs, self.still, state, self.watch)
        training = needs_gradients(inputs.query) and not torch.compiler.is_exporting()
        if training or (in_place and not torch.compiler.is_compiling()):
            return kernel(inputs, self.still, state, in_place=in_place)
        return hybrid_attention(inputs, self.still, state)


class StillAttention(HybridOpModule):
    """Hybrid attention with the projections, and query and key norms, of the replaced module."""

    weight_roles: ClassVar[dict[str, str]] = ProjectedAttention.weight_roles | {
        "g_proj.weight": GATE,
        "feature_q_weight": FEATURE_MAP,
        "feature_k_weight": FEATURE_MAP,
    }
    fresh = ("feature_", "g_proj.")

    def __init__(
        self,
        base: Any,
        config: HybridAttentionConfig,
        hidden_size: int,
        gate_bias: bool = True,
        shared_feature_map: bool = False,
    ) -> None:
        super().__init__(base, config)
        like: dict[str, Any] = {"device": base.q_proj.weight.device, "dtype": base.q_proj.weight.dtype}
        self.g_proj = None
        if config.gate == "channel":
            self.g_proj = nn.Linear(hidden_size, config.num_heads * config.head_dim, bias=gate_bias, **like)
        shape = (1 if shared_feature_map else config.num_heads, config.projection_dim, config.head_dim)
        self.feature_q_weight = nn.Parameter(torch.empty(shape, **like))
        self.feature_k_weight = nn.Parameter(torch.empty(shape, **like))
        self.reset_parameters()

    def initial(self, name: str) -> Tensor:
        """Like ProjectedAttention: identity directions, open gates."""
        parameter = self.get_parameter(name)
        shape, dtype = parameter.shape, parameter.dtype
        if name.startswith("feature_"):
            return torch.eye(*shape[1:], dtype=dtype).expand(shape).contiguous()
        return torch.full(shape, OPEN_GATE_BIAS if name == "g_proj.bias" else 0.0, dtype=dtype)

    def project(
        self, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Query [B, T, H, D] and key [B, T, HK, D] after norm and RoPE, value [B, T, HK, D], gate [B, T, H, D] or None."""
        query, key, value = self.project_heads(hidden, position_embeddings)
        key, value = rounded(key, self.cache), rounded(value, self.cache)
        gate = None if self.g_proj is None else torch.sigmoid(self.g_proj(hidden)).view(query.shape)
        return query, key, value, gate

    def mix(self, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor] | None, past_key_values: Any) -> Tensor:
        query, key, value, gate = self.project(hidden, position_embeddings)
        weights = (self.feature_q_weight, self.feature_k_weight)
        output = self.attend((query, key, value, gate, *weights), past_key_values)
        return self.o_proj(output.flatten(2))
