"""Families whose layers are linear already: what takes the place of each layer's mixer, and what is not covered.

Such a model is exported as it is: nothing is linearized, nothing untrained attached. Their STILL configuration follows from their own.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    KimiLinearConfig,
    KimiLinearForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Mamba2Config,
    OlmoHybridConfig,
    OlmoHybridForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from transformers.models.mamba2.modeling_mamba2 import Mamba2Block, Mamba2RMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

from still_export.errors import UnsupportedModelError
from still_export.mixers.config import LayersConfig
from still_export.mixers.layers import FULL
from still_export.models.families import Family
from still_export.models.fla_families import FLA_FAMILIES
from still_export.models.linear_mixins import LinearConfigMixin, LinearModelMixin, Place
from still_export.models.stack import Stack, StackForCausalLM

_GATED_DELTA = {
    "linear_attention": Place("gated_delta_net", ("linear_attn",)),
    "full_attention": Place(FULL, ("self_attn",)),
}


@strict
class StillQwen3_5TextConfig(LinearConfigMixin, Qwen3_5TextConfig):
    """Qwen3.5, its text: gated delta rule, softmax with an output gate."""

    model_type = "still_qwen3_5_text"
    places = _GATED_DELTA
    still_config: dict[str, Any] | None = None


@strict
class StillQwen3NextConfig(LinearConfigMixin, Qwen3NextConfig):
    """Qwen3-Next without experts: as Qwen3.5."""

    model_type = "still_qwen3_next"
    places = _GATED_DELTA
    still_config: dict[str, Any] | None = None


@strict
class StillOlmoHybridConfig(LinearConfigMixin, OlmoHybridConfig):
    """OLMo-Hybrid: gated delta rule with beta up to 2, softmax with norms over all heads."""

    model_type = "still_olmo_hybrid"
    places = _GATED_DELTA
    still_config: dict[str, Any] | None = None


@strict
class StillKimiLinearConfig(LinearConfigMixin, KimiLinearConfig):
    """Kimi Linear without experts: gated delta rule with a decay per key channel, attention to latents without positions."""

    model_type = "still_kimi_linear"
    places: ClassVar[dict[str, Place]] = {
        "linear_attention": Place("gated_delta_net", ("self_attn",)),
        "full_attention": Place("latent_attention", ("self_attn",)),
    }
    still_config: dict[str, Any] | None = None

    linear_num_key_heads = linear_num_value_heads = property(lambda self: self.linear_num_heads)
    linear_key_head_dim = linear_value_head_dim = property(lambda self: self.linear_head_dim)

    def check(self, still: LayersConfig) -> None:
        super().check(still)
        if getattr(self, "mla_use_nope", True) is False:
            raise UnsupportedModelError(
                "mla_use_nope=false in config.json: attention to latents is covered without positions alone, as transformers has it."
            )


@strict
class StillGraniteMoeHybridConfig(LinearConfigMixin, GraniteMoeHybridConfig):
    """Granite 4 without experts: Mamba-2, softmax with or without positions."""

    model_type = "still_granitemoehybrid"
    places: ClassVar[dict[str, Place]] = {
        "linear_attention": Place("mamba2", ("mamba",)),
        "full_attention": Place(FULL, ("self_attn",)),
    }
    still_config: dict[str, Any] | None = None


@strict
class StillLfm2Config(LinearConfigMixin, Lfm2Config):
    """LFM2: short convolutions, softmax."""

    model_type = "still_lfm2"
    places: ClassVar[dict[str, Place]] = {
        "conv": Place("short_conv", ("conv",)),
        "full_attention": Place(FULL, ("self_attn",)),
    }
    still_config: dict[str, Any] | None = None


@strict
class StillMamba2Config(LinearConfigMixin, Mamba2Config):
    """Mamba-2 alone: no softmax, no feed-forward layers; nothing in it has a position, so its context is as long as one likes."""

    model_type = "still_mamba2"
    attribute_map: ClassVar[dict[str, str]] = {"num_attention_heads": "num_heads", "num_key_value_heads": "num_heads"}
    places: ClassVar[dict[str, Place]] = {"linear_attention": Place("mamba2", ("mixer",))}
    max_position_embeddings: int = 1 << 20
    still_config: dict[str, Any] | None = None


@strict
class StillFalconH1Config(LinearConfigMixin, FalconH1Config):
    """Falcon-H1: softmax and Mamba-2 side by side in every layer."""

    model_type = "still_falcon_h1"
    places: ClassVar[dict[str, Place]] = {"hybrid": Place("parallel_mamba2", ("mamba", "self_attn"))}
    still_config: dict[str, Any] | None = None


class Qwen3_5TextPositions(Qwen3_5TextRotaryEmbedding):
    """RoPE of text alone, whose places in time, height and width are one number."""

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        places = position_ids if position_ids.ndim == 2 else position_ids[0]
        angles = places[..., None].float() * self.inv_freq.float()
        angles = torch.cat((angles, angles), dim=-1)
        return tuple((turn * self.attention_scaling).to(x.dtype) for turn in (angles.cos(), angles.sin()))  # type: ignore[return-value]


class StillQwen3_5ForCausalLM(LinearModelMixin, Qwen3_5ForCausalLM):
    """Qwen3.5's text."""

    def __init__(self, config: StillQwen3_5TextConfig) -> None:
        super().__init__(config)
        self.model.rotary_emb = Qwen3_5TextPositions(config)

    config_class = StillQwen3_5TextConfig


class StillQwen3NextForCausalLM(LinearModelMixin, Qwen3NextForCausalLM):
    """Qwen3-Next."""

    config_class = StillQwen3NextConfig


class StillOlmoHybridForCausalLM(LinearModelMixin, OlmoHybridForCausalLM):
    """OLMo-Hybrid."""

    config_class = StillOlmoHybridConfig


class StillKimiLinearForCausalLM(LinearModelMixin, KimiLinearForCausalLM):
    """Kimi Linear."""

    config_class = StillKimiLinearConfig


class StillGraniteMoeHybridForCausalLM(LinearModelMixin, GraniteMoeHybridForCausalLM):
    """Granite 4."""

    config_class = StillGraniteMoeHybridConfig

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden) / self.config.logits_scaling


class StillFalconH1ForCausalLM(LinearModelMixin, FalconH1ForCausalLM):
    """Falcon-H1."""

    config_class = StillFalconH1Config

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden) * self.config.lm_head_multiplier


class StillMamba2ForCausalLM(LinearModelMixin, StackForCausalLM):
    """Mamba-2 alone."""

    config_class = StillMamba2Config

    def stack(self, config: Any) -> Stack:
        layers = [Mamba2Block(config, index) for index in range(config.num_hidden_layers)]
        return Stack(config, layers, Mamba2RMSNorm(config.hidden_size, config.layer_norm_epsilon))

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden.to(self.dtype))  # the sums of layers are float32

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Without the cache that transformers makes for classes with "mamba" in their name, beside the one that it is given."""
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)
        inputs.pop("cache_params", None)
        return inputs


class StillLfm2ForCausalLM(LinearModelMixin, Lfm2ForCausalLM):
    """LFM2."""

    config_class = StillLfm2Config


LINEAR_FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("qwen3_5_text", Qwen3_5TextConfig, StillQwen3_5TextConfig, StillQwen3_5ForCausalLM, linear=True),
        Family("qwen3_next", Qwen3NextConfig, StillQwen3NextConfig, StillQwen3NextForCausalLM, linear=True),
        Family("olmo_hybrid", OlmoHybridConfig, StillOlmoHybridConfig, StillOlmoHybridForCausalLM, linear=True),
        Family(
            "granitemoehybrid",
            GraniteMoeHybridConfig,
            StillGraniteMoeHybridConfig,
            StillGraniteMoeHybridForCausalLM,
            linear=True,
        ),
        Family("kimi_linear", KimiLinearConfig, StillKimiLinearConfig, StillKimiLinearForCausalLM, linear=True),
        Family("lfm2", Lfm2Config, StillLfm2Config, StillLfm2ForCausalLM, linear=True),
        Family("falcon_h1", FalconH1Config, StillFalconH1Config, StillFalconH1ForCausalLM, linear=True),
        Family("mamba2", Mamba2Config, StillMamba2Config, StillMamba2ForCausalLM, linear=True),
        *FLA_FAMILIES,
    )
}
"""Families by transformers' model_type."""

_EXPERTS = "its layers have experts"
_MAMBA_1 = "Mamba-1 decays each channel's states apart, which needs an op of its own"
_SPARSE = "its softmax layers select keys"
_BEFORE = "RWKV reads its state before the token's update, which no rule of the op does"
NOT_COVERED = {
    **dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text", "lfm2_moe", "minimax", "bailing_hybrid"), _EXPERTS),
    **dict.fromkeys(("mamba", "falcon_mamba", "jamba", "zamba", "samba"), _MAMBA_1),
    **dict.fromkeys(("qwen4_exp", "glm5_next", "minicpm_sala", "deepseek_v32", "nsa"), _SPARSE),
    **dict.fromkeys(("rwkv", "rwkv6"), _BEFORE),
    "rwkv7": "RWKV-7 moves its state by two more vectors of each token, which no rule of the op does",
    **dict.fromkeys(("ttt", "titans"), "its memory is trained token by token (TTT), which no rule of the op does"),
    "xlstm": "xLSTM's exponential gate needs a running maximum as a state",
    "recurrent_gemma": "RG-LRU has no mixer here yet",
    "bamba": "Bamba has no family here yet",
    "nemotron_h": "its layers are single blocks, which have no family here yet",
    "zamba2": "its softmax blocks are shared between layers",
}
"""Linear families that are refused, and why."""

for _family in LINEAR_FAMILIES.values():
    AutoConfig.register(_family.still_config.model_type, _family.still_config)  # type: ignore[attr-defined]
    AutoModelForCausalLM.register(_family.still_config, _family.still_model)
