"""Layers of type "decay": module, cache layer."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from still_export.mixers.base import LayerOp, Mixer
from still_export.mixers.fixed import FixedStates
from still_export.mixers.layers import head_size
from still_export.mixers.projections import ProjectedAttention
from tests.toy.meaning import Inputs, decay
from tests.toy.spec import DECAY


class DecayAttention(ProjectedAttention):
    """Values summed with decay, in the place of attention."""

    def forward(
        self, hidden_states: Tensor, position_embeddings: Any = None, past_key_values: Any = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        query, _, value = self.project_heads(hidden_states, position_embeddings)
        value = value.repeat_interleave(query.shape[2] // value.shape[2], dim=2)
        layer = past_key_values.layers[self.layer_idx]
        past = layer.take(value.dtype, value.device)["total"]
        output, total = decay(Inputs(value, layer.new_tokens, layer.length), past)
        layer.store({"total": total})
        return self.o_proj(output.flatten(2)), None


class DecayMixer(Mixer):
    """For the registry."""

    name = "decay"

    def ops(self, config: Any, index: int) -> tuple[LayerOp, ...]:
        return (LayerOp(DECAY, {"decay": 0.5}, {"H": config.num_attention_heads, "D": head_size(config)}),)

    def cache_layer(self, config: Any, index: int) -> FixedStates:
        return FixedStates(self.ops(config, index))

    def module(self, base: nn.Module, config: Any, index: int) -> nn.Module:
        return DecayAttention(base, head_size(config))
