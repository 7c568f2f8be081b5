"""MiniMax: Lightning attention in most layers, softmax in the others."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import MiniMaxConfig, MiniMaxForCausalLM

from still_export.errors import UnsupportedModelError
from still_export.mixers.cache_layer import CACHE
from still_export.mixers.config import LayersConfig
from still_export.mixers.layers import FULL, head_size
from still_export.models.base import no_mask
from still_export.models.families.linear_mixins import LinearConfigMixin, LinearModelMixin, Place, linear_family


class MiniMaxConfigMixin(LinearConfigMixin):
    """Sizes of Lightning layers; refuses settings that are not covered."""

    def lightning_sizes(self, index: int) -> tuple[int, int, int, float]:
        size = head_size(self)
        return self.num_attention_heads, size, size, 1.0  # type: ignore[attr-defined]

    def check(self, still: LayersConfig) -> None:
        super().check(still)
        if (window := getattr(self, "sliding_window", None)) is not None:
            raise UnsupportedModelError(
                f"sliding_window={window} in config.json: MiniMax is covered without a window alone."
            )


class MiniMaxModelMixin(LinearModelMixin):
    """MiniMax's base model accepts only its own cache class with use_cache, so that is False here."""

    def decode(self, positions: Tensor, cache: Any, **kwargs: Any) -> Any:
        masks = no_mask(self.config, self.model.embed_tokens.weight)
        return self.model(attention_mask=masks, position_ids=positions, use_cache=False, **{CACHE: cache}, **kwargs)


FAMILIES = (
    linear_family(
        __name__,
        MiniMaxConfig,
        MiniMaxForCausalLM,
        {
            "linear_attention": Place("lightning_attention", ("self_attn",)),
            "full_attention": Place(FULL, ("self_attn",)),
        },
        (MiniMaxConfigMixin, MiniMaxModelMixin),
    ),
)
