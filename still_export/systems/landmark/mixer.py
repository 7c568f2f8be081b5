"""Landmark attention's layers: tokens of other blocks are found through the landmarks of their blocks."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from still_export.mixers.attention.keyed import KeyedAttention
from still_export.mixers.attention.mixer import KeysMixer, sizes
from still_export.mixers.base import LayerOp
from still_export.mixers.layers import head_size
from still_kernels.landmark_attention.meaning import Inputs, landmark_attention
from still_kernels.landmark_attention.spec import LANDMARK_ATTENTION


class Landmark(KeyedAttention):
    """Landmark attention (arXiv:2305.16300), with the projections of the module that it replaces.

    block_tokens: Tokens of a block, including its landmark.
    top_blocks: Blocks that a head reads per token; 0: all.
    rope_base: RoPE base of the positions that the op assigns to selected blocks.
    """

    block_tokens: int
    top_blocks: int
    rope_base: float

    def mix(self, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor] | None, past_key_values: Any) -> Tensor:
        heads = self.heads(hidden) if self.top_blocks else self.project_heads(hidden, position_embeddings)
        options = {name: getattr(self, name) for name in ("block_tokens", "top_blocks", "rope_base")}
        output = self.attended(landmark_attention, Inputs, heads, past_key_values, **options)
        return self.project_out(output, hidden)


class LandmarkAttentionMixer(KeysMixer):
    """Layers of type "landmark_attention"; a family's configuration has `retrieval`, the op's attributes."""

    name = "landmark_attention"
    of_families = True
    as_numbers = "finds blocks by the keys of landmarks, which are kept as numbers"

    def ops(self, config: Any, index: int) -> tuple[LayerOp, ...]:
        return (LayerOp(LANDMARK_ATTENTION, config.retrieval, sizes(config)),)

    def made(self, base: nn.Module, config: Any, index: int) -> Landmark:
        module = Landmark(base, head_size(config))
        for name, value in config.retrieval.items():
            setattr(module, name, value)
        return module


MIXERS = (LandmarkAttentionMixer(),)
