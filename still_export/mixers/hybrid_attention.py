"""STILL's hybrid attention: the module that takes the place of a family's attention and keeps its projections, its cache, its mixer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.cache_utils import Cache

from still_export.errors import UnsupportedError
from still_export.mixers.base import StillCacheLayer
from still_export.mixers.config import HYBRID
from still_export.mixers.torch_ops import hybrid_attention
from still_graphs.ops.hybrid_attention import HYBRID_ATTENTION
from still_graphs.ops.spec import AttributeValue
from still_kernels.dispatch import hybrid_attention as kernel
from still_kernels.hybrid_attention import HybridAttentionConfig, HybridAttentionState

OPEN_GATE_BIAS = 8.0
"""Bias of fresh gates: sigmoid(8) = 0.9997, so untrained linear terms count almost fully and the gate still has a gradient."""


class StillAttention(nn.Module):
    """Hybrid attention with the projections, and the norms of queries and keys, of the module that it replaces.

    Args:
        base: The family's attention module; its submodules are taken over, not copied.
        config: The layer.
        hidden_size: Channels of the model.
        gate_bias: The gate projection has a bias.
        shared_feature_map: One feature projection for all heads.
    """

    def __init__(
        self,
        base: Any,
        config: HybridAttentionConfig,
        hidden_size: int,
        gate_bias: bool = True,
        shared_feature_map: bool = False,
    ) -> None:
        super().__init__()
        self.still = config
        self.layer_idx: int = base.layer_idx
        self.head_dim = config.head_dim
        self.use_rope = bool(getattr(base, "use_rope", True))  # SmolLM3 leaves some layers without positions
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = base.q_proj, base.k_proj, base.v_proj, base.o_proj
        self.q_norm: nn.Module | None = getattr(base, "q_norm", None)  # Qwen3
        self.k_norm: nn.Module | None = getattr(base, "k_norm", None)
        like: dict[str, Any] = {"device": base.q_proj.weight.device, "dtype": base.q_proj.weight.dtype}
        self.g_proj = None
        if config.gate == "channel":
            self.g_proj = nn.Linear(hidden_size, config.num_heads * config.head_dim, bias=gate_bias, **like)
        shape = (1 if shared_feature_map else config.num_heads, config.projection_dim, config.head_dim)
        self.feature_q_weight = nn.Parameter(torch.empty(shape, **like))
        self.feature_k_weight = nn.Parameter(torch.empty(shape, **like))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start so that the untrained layer is usable: identity directions, open gates."""
        rows, columns = self.feature_q_weight.shape[1:]
        for weight in (self.feature_q_weight, self.feature_k_weight):
            init.copy_(weight, torch.eye(rows, columns, dtype=weight.dtype).expand(weight.shape))
        if self.g_proj is not None:
            init.zeros_(self.g_proj.weight)
            if self.g_proj.bias is not None:
                init.constant_(self.g_proj.bias, OPEN_GATE_BIAS)

    def project(
        self, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Query [B, T, H, D] and key [B, T, HK, D] after norm and RoPE, value [B, T, HK, D], gate [B, T, H, D] or None."""
        heads = (*hidden.shape[:-1], -1, self.head_dim)
        query, key, value = (proj(hidden).view(heads) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        if self.use_rope:
            if position_embeddings is None:
                raise UnsupportedError(
                    "StillAttention needs position_embeddings (cos, sin) from the model's rotary module."
                )
            cos, sin = (x[:, :, None] for x in position_embeddings)
            query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        gate = None if self.g_proj is None else torch.sigmoid(self.g_proj(hidden)).view(heads)
        return query, key, value, gate

    def forward_state(
        self,
        hidden: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None,
        state: HybridAttentionState,
        new_tokens: Tensor,
        in_place: bool = False,
    ) -> tuple[Tensor, HybridAttentionState]:
        """Attend from new tokens after those that `state` has seen.

        Args:
            hidden: [B, T, channels], right-padded.
            position_embeddings: cos, sin at the tokens' absolute positions, each [B or 1, T, D].
            state: What the rows have seen; unchanged by the call unless `in_place`.
            new_tokens: Tokens that each row brings, int64 [B].
            in_place: The new state may be written into `state`'s tensors; it is on CUDA, except in a traced or trained model.

        Returns:
            [B, T, channels], meaningless at padding, and the state after the new tokens.
        """
        query, key, value, gate = self.project(hidden, position_embeddings)
        # The op is one node for export and has no derivative; training differentiates through the kernel itself.
        training = torch.is_grad_enabled() and query.requires_grad and not torch.compiler.is_exporting()
        given = (query, key, value, gate, self.feature_q_weight, self.feature_k_weight, self.still, state, new_tokens)
        if training or (in_place and not torch.compiler.is_compiling()):
            output, state = kernel(*given, in_place=in_place)
        else:
            output, state = hybrid_attention(*given)
        return self.o_proj(output.flatten(2)), state

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
        batch, tokens = hidden_states.shape[:2]
        if past_key_values is None:
            slots = self.still.slots_for(tokens) if self.still.overflow == "error" else self.still.capacity_slots
            state = HybridAttentionState.empty(
                self.still, batch, hidden_states.dtype, hidden_states.device, slots=slots
            )
            new_tokens = torch.full((batch,), tokens, dtype=torch.int64, device=hidden_states.device)
            return self.forward_state(hidden_states, position_embeddings, state, new_tokens)[0], None
        layer = past_key_values.layers[self.layer_idx] if isinstance(past_key_values, Cache) else None
        if not isinstance(layer, HybridLayer) or layer.new_tokens is None:
            raise UnsupportedError(
                f"layer {self.layer_idx} is hybrid attention and got a {type(past_key_values).__name__}; "
                "pass past_key_values=StillCache.empty(model.config), or none, to the model's forward."
            )
        state = layer.take(hidden_states.dtype, hidden_states.device)
        output, state = self.forward_state(
            hidden_states, position_embeddings, state, layer.new_tokens, in_place=layer.owned
        )
        layer.store(state)
        return output, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions to [B, T, h, D]; cos, sin [B or 1, T, 1, D] pair channel i with i + D/2."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class HybridLayer(StillCacheLayer):
    """State of one hybrid attention layer.

    `owned`: nobody else has the state's tensors, so a call may write into them; a copy of the salient cache per token would cost
    more than the step that needs it.
    """

    def __init__(self, config: HybridAttentionConfig) -> None:
        super().__init__()
        self.config = config
        self.state: HybridAttentionState | None = None
        self.owned = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise UnsupportedError(
            "a softmax attention module asked a hybrid layer's cache for all keys; the cache and the model's layer_types "
            "disagree. Create the cache by StillCache.empty(model.config)."
        )

    def take(self, dtype: torch.dtype, device: torch.device) -> HybridAttentionState:
        """The state to continue from, with room for the tokens of the announced call."""
        assert self.new_tokens is not None and self.length is not None
        if self.state is None:
            slots = 0 if self.config.overflow == "error" else self.config.capacity_slots
            batch = self.new_tokens.shape[0]
            self.state = HybridAttentionState.empty(self.config, batch, dtype, device, slots=slots)
            self.is_initialized = True
        if self.grows and self.config.overflow == "error":
            needed = min(self.config.capacity_slots, self.config.slots_for(self.columns))
            if needed > self.state.slots:
                # Doubling keeps the copies of a long decode rare.
                self.state = with_slots(self.state, min(self.config.capacity_slots, max(needed, 2 * self.state.slots)))
        return self.state

    def store(self, state: HybridAttentionState) -> None:
        """Keep the state after the call."""
        self.state, self.length, self.owned = state, state.length, True

    def states(self) -> dict[str, Tensor]:
        assert self.state is not None, "the cache is empty"
        self.owned = False
        return {name: tensor for name, tensor in self.state.tensors().items() if name != "length"}

    def load(self, states: Mapping[str, Tensor], length: Tensor) -> None:
        super().load(states, length)
        self.state, self.owned = HybridAttentionState(**states, length=length), False

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        super().map_rows(change)
        if self.state is not None:
            self.state = HybridAttentionState(**{name: change(x) for name, x in self.state.tensors().items()})

    def reset(self) -> None:
        super().reset()
        self.state = None

    def get_max_length(self) -> int:
        return self.config.capacity_tokens if self.config.overflow == "error" else -1


def with_slots(state: HybridAttentionState, slots: int) -> HybridAttentionState:
    """`state` with its salient cache padded with empty slots to `slots`."""
    more = slots - state.slots
    pad = torch.nn.functional.pad
    return replace(
        state,
        salient_key=pad(state.salient_key, (0, 0, 0, more)),
        salient_value=pad(state.salient_value, (0, 0, 0, more)),
        salient_score=None if state.salient_score is None else pad(state.salient_score, (0, more)),
    )


class HybridAttentionMixer:
    """Layers of type "hybrid_attention"."""

    name = HYBRID
    op = HYBRID_ATTENTION

    def attributes(self, config: Any, index: int) -> dict[str, AttributeValue]:
        return self._layer(config, index).attributes()

    def symbols(self, config: Any, index: int) -> dict[str, int]:
        return self._layer(config, index).symbols()

    def cache_layer(self, config: Any, index: int) -> HybridLayer:
        return HybridLayer(self._layer(config, index))

    def module(self, base: nn.Module, config: Any, index: int) -> StillAttention:
        still = config.still
        layer = self._layer(config, index)
        return StillAttention(base, layer, config.hidden_size, still.gate_bias, still.shared_feature_map)

    def _layer(self, config: Any, index: int) -> HybridAttentionConfig:
        return config.still.layer_config(config, index)
