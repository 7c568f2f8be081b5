"""RecurrentGemma: RG-LRU in most layers, softmax with a window in the others, scaled embeddings, capped logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.recurrent_gemma.configuration_recurrent_gemma import RecurrentGemmaConfig
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import (
    RecurrentGemmaDecoderLayer,
    RecurrentGemmaRMSNorm,
    RecurrentGemmaRotaryEmbedding,
)

from still_export.errors import ConfigError, UnsupportedModelError
from still_export.mixers.config import LayersConfig
from still_export.mixers.layers import WINDOWED
from still_export.models.families.gemma import capped
from still_export.models.families.linear_mixins import LinearConfigMixin, LinearModelMixin, Place, stack_family
from still_export.models.families.mamba import FIELDS
from still_export.models.families.softmax_families import Published
from still_export.models.families.stack import Stack
from still_export.models.families.support import SLIDING

BLOCKS = ("recurrent", "attention")


class RecurrentGemmaLayer(RecurrentGemmaDecoderLayer):
    def __init__(self, config: Any, index: int) -> None:
        super().__init__(config, index)
        self.temporal_block.layer_idx = index

    def forward(self, hidden: Tensor, cache: Any, **kwargs: Any) -> Tensor:
        """Hidden states [B, T, channels]; `cache` is a StillCache or None."""
        mixed = self.temporal_block(self.temporal_pre_norm(hidden), cache=cache, past_key_values=cache, **kwargs)
        hidden = hidden + (mixed[0] if isinstance(mixed, tuple) else mixed)
        return hidden + self.mlp_block(self.channel_pre_norm(hidden))


class RecurrentGemmaStack(Stack):
    def __init__(self, config: Any) -> None:
        scale = torch.tensor(
            config.hidden_size**0.5, dtype=torch.bfloat16, device="cpu"
        ).item()  # in a model of any type
        norm = RecurrentGemmaRMSNorm(config.hidden_size, config.rms_norm_eps)
        super().__init__(config, RecurrentGemmaLayer, norm, RecurrentGemmaRotaryEmbedding(config), scale)

    def forward(self, input_ids: Any = None, inputs_embeds: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
        later = (position_ids != 0)[..., None]
        return super().forward(input_ids, inputs_embeds, position_ids, later=later, **kwargs)


class RecurrentGemmaConfigMixin(LinearConfigMixin):
    def check(self, still: LayersConfig) -> None:
        config: Any = self
        super().check(still)
        if unknown := sorted(set(config.block_types) - set(BLOCKS)):
            raise UnsupportedModelError(
                f"block_types in config.json name {', '.join(unknown)}; covered: {', '.join(BLOCKS)}."
            )
        if config.lru_width % config.num_attention_heads:
            raise ConfigError(
                f"lru_width={config.lru_width} in config.json is no multiple of num_attention_heads={config.num_attention_heads}, the "
                "number of blocks of its gates. Fix one of them."
            )


class RecurrentGemmaModelMixin(LinearModelMixin):
    def logits(self, hidden: Tensor) -> Tensor:
        return capped(super().logits(hidden), self.config.logits_soft_cap)


FAMILIES = (
    stack_family(
        __name__,
        RecurrentGemmaConfig,
        RecurrentGemmaStack,
        (RecurrentGemmaConfigMixin, RecurrentGemmaModelMixin),
        title="RecurrentGemma",
        name="recurrent_gemma",
        fields=FIELDS,
        places={
            "linear_attention": Place("rg_lru", ("temporal_block",)),
            SLIDING: Place(WINDOWED, ("temporal_block",)),
        },
        published=Published(names=(("model.final_norm.", "model.norm."),)),
    ),
)
