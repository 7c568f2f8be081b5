"""Qwen3.5, Qwen3-Next and OLMo-Hybrid: the gated delta rule in most layers, softmax in the others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import (
    OlmoHybridConfig,
    OlmoHybridForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

from still_export.mixers.layers import FULL
from still_export.models.families.linear_mixins import LinearConfigMixin, LinearModelMixin, Place, linear_family

PLACES = {"linear_attention": Place("gated_delta_net", ("linear_attn",)), "full_attention": Place(FULL, ("self_attn",))}


class Qwen3_5TextPositions(Qwen3_5TextRotaryEmbedding):
    """RoPE of text, where positions in time, height and width are equal. With a vision encoder each channel uses one of them."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.rows: Tensor | None = None
        if getattr(config, "vision_config", None):
            rows = torch.zeros(len(self.inv_freq), dtype=torch.int64)
            for row, channels in enumerate(self.mrope_section or ()):
                if row:
                    rows[row : 3 * channels : 3] = row
            del self.rows
            self.register_buffer("rows", rows, persistent=False)

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        if self.rows is not None:
            angles = position_ids[self.rows].permute(1, 2, 0).float() * self.inv_freq.float()
        else:
            places = position_ids if position_ids.ndim == 2 else position_ids[0]
            angles = places[..., None].float() * self.inv_freq.float()
        angles = torch.cat((angles, angles), dim=-1)
        return tuple((turn * self.attention_scaling).to(x.dtype) for turn in (angles.cos(), angles.sin()))  # type: ignore[return-value]


class Qwen3_5ModelMixin(LinearModelMixin):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.rotary_emb = Qwen3_5TextPositions(config)


FAMILIES = (
    # the text of Qwen3.5
    linear_family(__name__, Qwen3_5TextConfig, Qwen3_5ForCausalLM, PLACES, (LinearConfigMixin, Qwen3_5ModelMixin)),
    linear_family(
        __name__, Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM, PLACES, (LinearConfigMixin, Qwen3_5ModelMixin)
    ),
    linear_family(__name__, Qwen3NextConfig, Qwen3NextForCausalLM, PLACES),
    linear_family(__name__, OlmoHybridConfig, OlmoHybridForCausalLM, PLACES),
)
