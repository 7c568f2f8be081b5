"""Flux Attention's layers: full attention, or sinks and a window, depending on the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from still_export.mixers.attention.cache import AttentionLayer
from still_export.mixers.attention.keyed import KeyedAttention
from still_export.mixers.attention.mixer import KeysMixer, sizes
from still_export.mixers.base import LayerOp
from still_export.mixers.cache_layer import part_of
from still_export.mixers.fixed import states_of
from still_export.mixers.layers import head_size
from still_export.mixers.parallel_mamba2.mixer import AttentionAndFixedStates
from still_export.mixers.roles import ROUTER
from still_kernels.attention.meaning import AttentionState
from still_kernels.block_attention.call import block_attention
from still_kernels.block_attention.meaning import Inputs
from still_kernels.block_attention.spec import BLOCK_ATTENTION
from still_kernels.linear_attention.call import linear_attention
from still_kernels.linear_attention.meaning import Inputs as RuleInputs
from still_kernels.linear_attention.spec import LINEAR_ATTENTION

BLOCK = 128
"""Tokens of a block; sinks and windows are whole blocks."""


class WidthRouter(nn.Module):
    """Logits of narrow and full [.., 2] from mean queries [.., D]; the decision has no derivative."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        act = nn.SiLU
        self.cls_feat_extractor = nn.Sequential(nn.Linear(dim, 8 * dim), act(), nn.Linear(8 * dim, 2 * dim))
        self.cls_router_head_agnostic = nn.Sequential(
            nn.Linear(2 * dim, 4 * dim), act(), nn.Linear(4 * dim, dim), act(), nn.Linear(dim, 2)
        )

    def forward(self, pooled: Tensor) -> Tensor:
        return self.cls_router_head_agnostic(self.cls_feat_extractor(pooled))


class ChosenWidth(KeyedAttention):
    """Flux Attention (arXiv:2604.07394): the first and last queries of the first call decide permanently whether the layer is full
    attention or attends only to the first and the latest blocks.

    Args:
        decided: The op whose state stores the decision.
    """

    weight_roles: ClassVar[dict[str, str]] = {
        **KeyedAttention.weight_roles,
        **{f"mask_allocator.cls_feat_extractor.{i}.weight": ROUTER for i in (0, 2)},
        **{f"mask_allocator.cls_router_head_agnostic.{i}.weight": ROUTER for i in (0, 2, 4)},
    }

    def __init__(self, base: Any, head_dim: int, decided: Sequence[LayerOp], config: Any) -> None:
        super().__init__(base, head_dim)
        self.mask_allocator = WidthRouter(head_dim)
        self.decided, self.pool = tuple(decided), config.pool_size
        self.sinks, self.local = (-(-size // BLOCK) for size in (config.sink_size, config.local_window_size))

    def narrow(self, query: Tensor, cache: Any) -> Tensor:
        """Whether each sequence's layer is narrow, bool [B], from queries before RoPE [B, T, H, D]."""
        before, new_tokens, layer = states_of(cache, self.layer_idx, self.decided, query.flatten(2))
        attention = part_of(cache, self.layer_idx, AttentionLayer)
        seen = torch.zeros_like(new_tokens) if attention is None or attention.length is None else attention.length
        wide = torch.promote_types(query.dtype, torch.float32)
        place, count = torch.arange(query.shape[1], device=query.device), new_tokens[:, None]
        real = place < count
        weight = real.to(wide) * ((place < self.pool).to(wide) + (place >= count - self.pool).to(wide))
        rows = torch.where(real[..., None], query.mean(2).to(wide), 0.0)
        pooled = (rows * weight[..., None]).sum(1) / weight.sum(1, keepdim=True).clamp_min(1.0)
        narrow, full = self.mask_allocator(pooled.to(query.dtype)).unbind(-1)
        decision = torch.where(full > narrow, 1.0, -1.0) * (seen == 0)
        value = (decision[:, None] * (place == 0)).to(query.dtype)[..., None]  # [B, T, 1]
        one = torch.ones_like(value)[..., None]
        inputs = RuleInputs(
            one[..., None], one, value[..., None], new_tokens=new_tokens, update_rule="linear", scale=1.0
        )
        output, state = linear_attention(inputs, before["recurrent_state"])
        if layer is not None:
            layer.store({"recurrent_state": state})
        return output[:, 0, 0, 0, 0] < 0

    def blocks(self, narrow: Tensor, inputs: Inputs, state: AttentionState) -> Tensor:
        """Blocks that each token reads, int32 [B, T, HK, blocks of the state and more]."""
        tokens, key_heads = inputs.key.shape[1:3]
        own = (state.length[:, None] + torch.arange(tokens, device=narrow.device)) // BLOCK  # [B, T]
        number = torch.arange(
            state.key.shape[2] // BLOCK + 2, device=narrow.device
        )  # at least 2, because programs are traced for any number
        near = (number < self.sinks) | (number > own[..., None] - self.local)
        seen = (near | ~narrow[:, None, None]) & (number <= own[..., None])
        return torch.where(seen, number, -1).to(torch.int32)[:, :, None].expand(-1, -1, key_heads, -1)

    def mix(self, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor] | None, past_key_values: Any) -> Tensor:
        query, key, value = self.heads(hidden)
        narrow = self.narrow(query, past_key_values)

        def attend(inputs: Inputs, state: AttentionState, in_place: bool) -> tuple[Tensor, AttentionState]:
            return block_attention(replace(inputs, blocks=self.blocks(narrow, inputs, state)), state, in_place)

        heads = (*self.turned(query, key, position_embeddings), value)
        output = self.attended(attend, Inputs, heads, past_key_values, block_size=BLOCK)
        return self.o_proj(output.flatten(2))


class ChosenWidthMixer(KeysMixer):
    """Layers of type "chosen_width"; a family's configuration has `sink_size`, `local_window_size` and `pool_size`."""

    name = "chosen_width"
    of_families = True
    as_numbers = "reads chosen blocks, whose keys and values are kept as numbers"

    def ops(self, config: Any, index: int) -> tuple[LayerOp, ...]:
        # The decision is stored as the state of a linear rule with one number.
        decided = LayerOp(LINEAR_ATTENTION, {"update_rule": "linear", "scale": 1.0}, {"H": 1, "D": 1, "V": 1})
        return decided, LayerOp(BLOCK_ATTENTION, {"block_size": BLOCK}, sizes(config))

    def cache_layer(self, config: Any, index: int) -> AttentionAndFixedStates:
        decided, _ = self.ops(config, index)
        return AttentionAndFixedStates(
            (decided,), config.num_key_value_heads, head_size(config), config.still.deployment.cache
        )

    def made(self, base: nn.Module, config: Any, index: int) -> ChosenWidth:
        return ChosenWidth(base, head_size(config), self.ops(config, index)[:1], config)


MIXERS = (ChosenWidthMixer(),)
