"""Gemma 3's language model: windows in most layers, scaled embeddings, logits that may be capped."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from still_export.errors import UnsupportedModelError
from still_export.mixers.config import LayersConfig
from still_export.models.base import StillConfigMixin, StillModelMixin


class GemmaConfigMixin(StillConfigMixin):
    """Refuses settings that no checkpoint of Gemma 3 has."""

    def check(self, still: LayersConfig) -> None:
        for name, value in (("attn_logit_softcapping", None), ("use_bidirectional_attention", False)):
            if (found := getattr(self, name)) not in (value, None):
                raise UnsupportedModelError(
                    f"{name}={found} in config.json; covered: {value}. This checkpoint cannot be read."
                )
        super().check(still)


class ScaledEmbedding(nn.Embedding):
    """Rows times a factor rounded to the weights' type, as in transformers, where the factor is a buffer that no checkpoint stores."""

    def __init__(self, weight: nn.Parameter, scale: float) -> None:
        super().__init__(weight.shape[0], weight.shape[1], _weight=weight)
        self.scale = scale

    def forward(self, input_ids: Tensor) -> Tensor:
        rows = super().forward(input_ids)
        return rows * float(torch.tensor(self.scale, dtype=torch.float32).to(rows.dtype))


class GemmaModelMixin(StillModelMixin):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        table = self.model.embed_tokens
        self.model.embed_tokens = ScaledEmbedding(table.weight, table.scalar_embed_scale)

    def logits(self, hidden: Tensor) -> Tensor:
        return capped(super().logits(hidden), self.config.final_logit_softcapping)


def capped(logits: Tensor, most: float | None) -> Tensor:
    """Logits bent smoothly below `most`; None: unchanged."""
    return logits if most is None else torch.tanh(logits / most) * most
