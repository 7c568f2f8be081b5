"""Families whose layers are linear already: what takes the place of each layer's mixer, and what is not covered.

Such a model is exported as it is: nothing is linearized, nothing untrained attached. Their STILL configuration follows from their own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    BailingHybridConfig,
    BailingHybridForCausalLM,
    BambaConfig,
    BambaForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    FalconMambaConfig,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    KimiLinearConfig,
    KimiLinearForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Lfm2MoeConfig,
    Lfm2MoeForCausalLM,
    Lfm3Config,
    Lfm3ForCausalLM,
    Mamba2Config,
    MambaConfig,
    MiniMaxConfig,
    MiniMaxForCausalLM,
    NemotronHConfig,
    OlmoHybridConfig,
    OlmoHybridForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from transformers.models.falcon_mamba.modeling_falcon_mamba import FalconMambaBlock, FalconMambaRMSNorm
from transformers.models.mamba.modeling_mamba import MambaBlock, MambaRMSNorm
from transformers.models.mamba2.modeling_mamba2 import Mamba2Block, Mamba2RMSNorm
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHBlock, NemotronHRMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

from still_export.discovery import Registry
from still_export.errors import UnsupportedModelError
from still_export.mixers.cache_layer import CACHE
from still_export.mixers.config import LayersConfig
from still_export.mixers.layers import FULL, WINDOWED, head_size
from still_export.models.base import no_mask
from still_export.models.families import lara
from still_export.models.families.fla_families import FLA_FAMILIES
from still_export.models.families.hypenet import HYPENET
from still_export.models.families.linear_mixins import (
    LinearConfigMixin,
    LinearModelMixin,
    MambaModelMixin,
    Place,
    stack_family,
)
from still_export.models.families.mamba3 import MAMBA3
from still_export.models.families.mamba_in_llama import MAMBA_IN_LLAMA
from still_export.models.families.minicpm_sala import SALA
from still_export.models.families.radlads import RADLADS
from still_export.models.families.rwkv6 import RWKV5, RWKV6
from still_export.models.families.rwkv7 import RWKV7
from still_export.models.families.softmax_families import Family, make_family
from still_export.models.families.stack import Stack, StackForCausalLM
from still_export.models.families.support import SLIDING
from still_export.models.families.transnormer import TRANSNORMER
from still_export.models.families.zebra_llama import ZEBRA_LLAMA

_GATED_DELTA = {
    "linear_attention": Place("gated_delta_net", ("linear_attn",)),
    "full_attention": Place(FULL, ("self_attn",)),
}
_LATENT = {
    "linear_attention": Place("gated_delta_net", ("self_attn",)),
    "full_attention": Place("latent_attention", ("self_attn",)),
}
_SHORT_CONV = {"conv": Place("short_conv", ("conv",)), "full_attention": Place(FULL, ("self_attn",))}


class KimiConfigMixin(LinearConfigMixin):
    """Kimi Linear's names, which Ling has too, and what of it is not covered."""

    linear_num_key_heads = linear_num_value_heads = property(lambda self: self.linear_num_heads)
    linear_key_head_dim = linear_value_head_dim = property(lambda self: self.linear_head_dim)

    def check(self, still: LayersConfig) -> None:
        super().check(still)
        if getattr(self, "mla_use_nope", True) is False:
            raise UnsupportedModelError(
                "mla_use_nope=false in config.json: attention to latents is covered without positions alone, as transformers has it."
            )


class Qwen3_5TextPositions(Qwen3_5TextRotaryEmbedding):
    """RoPE of text alone, whose places in time, height and width are one number. Of a model that sees images each channel has its row."""

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
    """Positions of text."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.rotary_emb = Qwen3_5TextPositions(config)


class GraniteModelMixin(LinearModelMixin):
    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden) / self.config.logits_scaling


class FalconModelMixin(LinearModelMixin):
    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden) * self.config.lm_head_multiplier


class Mamba2ModelMixin(MambaModelMixin):
    block: type[nn.Module] = Mamba2Block
    norm: type[nn.Module] = Mamba2RMSNorm

    def stack(self, config: Any) -> Stack:
        return Stack(config, self.block, self.norm(config.hidden_size, config.layer_norm_epsilon))

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden.to(self.dtype))  # type: ignore[attr-defined]  # the sums of layers are float32


class Mamba1ModelMixin(Mamba2ModelMixin):
    block, norm = MambaBlock, MambaRMSNorm


class FalconMambaModelMixin(Mamba2ModelMixin):
    """The same with norms of the step, B and C."""

    block, norm = FalconMambaBlock, FalconMambaRMSNorm


class JambaConfigMixin(LinearConfigMixin):
    """The channels of its Mamba layers, as a size."""

    mamba_inner = property(lambda self: self.mamba_expand * self.hidden_size)


class MiniMaxConfigMixin(LinearConfigMixin):
    """Sizes of its Lightning layers, and what of MiniMax is not covered."""

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
    """Its base model takes no cache but its own where it is to be told of one."""

    def decode(self, positions: Tensor, cache: Any, **kwargs: Any) -> Any:
        masks = no_mask(self.config, self.model.embed_tokens.weight)
        return self.model(attention_mask=masks, position_ids=positions, use_cache=False, **{CACHE: cache}, **kwargs)


def _family(
    config: Any,
    model: Any,
    places: dict[str, Place],
    mixins: tuple[type, type] = (LinearConfigMixin, LinearModelMixin),
    **more: Any,
) -> Family:
    return make_family(__name__, config, model, mixins, linear=True, places=places, **more)


LINEAR_FAMILIES: Registry[Family] = Registry(
    (
        # the text of Qwen3.5
        _family(Qwen3_5TextConfig, Qwen3_5ForCausalLM, _GATED_DELTA, (LinearConfigMixin, Qwen3_5ModelMixin)),
        _family(Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM, _GATED_DELTA, (LinearConfigMixin, Qwen3_5ModelMixin)),
        _family(Qwen3NextConfig, Qwen3NextForCausalLM, _GATED_DELTA),
        _family(OlmoHybridConfig, OlmoHybridForCausalLM, _GATED_DELTA),
        _family(
            GraniteMoeHybridConfig,
            GraniteMoeHybridForCausalLM,
            {"linear_attention": Place("mamba2", ("mamba",)), "full_attention": Place(FULL, ("self_attn",))},
            (LinearConfigMixin, GraniteModelMixin),
        ),
        _family(
            BambaConfig,
            BambaForCausalLM,
            {"linear_attention": Place("mamba2", ("mamba",)), "full_attention": Place(FULL, ("self_attn",))},
        ),
        _family(
            KimiLinearConfig,
            KimiLinearForCausalLM,
            _LATENT,
            (KimiConfigMixin, LinearModelMixin),
        ),
        _family(BailingHybridConfig, BailingHybridForCausalLM, _LATENT, (KimiConfigMixin, LinearModelMixin)),
        _family(
            Lfm2Config,
            Lfm2ForCausalLM,
            _SHORT_CONV,
        ),
        _family(Lfm2MoeConfig, Lfm2MoeForCausalLM, _SHORT_CONV),
        _family(Lfm3Config, Lfm3ForCausalLM, {**_SHORT_CONV, SLIDING: Place(WINDOWED, ("self_attn",))}),
        _family(
            FalconH1Config,
            FalconH1ForCausalLM,
            {"hybrid": Place("parallel_mamba2", ("mamba", "self_attn"))},
            (LinearConfigMixin, FalconModelMixin),
        ),
        # no softmax, no feed-forward layers; nothing in it has a position, so its context is as long as one likes
        _family(
            Mamba2Config,
            StackForCausalLM,
            {"linear_attention": Place("mamba2", ("mixer",))},
            (LinearConfigMixin, Mamba2ModelMixin),
            title="Mamba2",
            fields={"max_position_embeddings": (int, 1 << 20)},
            attribute_map={"num_attention_heads": "num_heads", "num_key_value_heads": "num_heads"},
        ),
        *(
            _family(
                config,
                StackForCausalLM,
                {"linear_attention": Place("mamba", ("mixer",))},
                (LinearConfigMixin, mixin),
                title=title,
                fields={
                    "max_position_embeddings": (int, 1 << 20),
                    "num_attention_heads": (int, 1),
                    "num_key_value_heads": (int, 1),
                },
            )
            for title, config, mixin in (
                ("Mamba", MambaConfig, Mamba1ModelMixin),
                ("FalconMamba", FalconMambaConfig, FalconMambaModelMixin),
            )
        ),
        _family(
            JambaConfig,
            JambaForCausalLM,
            {"linear_attention": Place("mamba", ("mamba",)), "full_attention": Place(FULL, ("self_attn",))},
            (JambaConfigMixin, LinearModelMixin),
        ),
        _family(
            MiniMaxConfig,
            MiniMaxForCausalLM,
            {
                "linear_attention": Place("lightning_attention", ("self_attn",)),
                "full_attention": Place(FULL, ("self_attn",)),
            },
            (MiniMaxConfigMixin, MiniMaxModelMixin),
        ),
        stack_family(
            __name__,
            NemotronHConfig,
            lambda config: Stack(
                config, NemotronHBlock, NemotronHRMSNorm(config.hidden_size, config.layer_norm_epsilon)
            ),
            title="NemotronH",
            name="nemotron_h",
            places={
                "linear_attention": Place("mamba2", ("mixer",)),
                "full_attention": Place(FULL, ("mixer",)),
                **dict.fromkeys(("mlp", "moe"), Place("feed_forward", ())),
            },
        ),
        *FLA_FAMILIES,
        TRANSNORMER,
        SALA,
        RWKV5,
        RWKV6,
        RWKV7,
        *RADLADS,
        *MAMBA_IN_LLAMA,
        ZEBRA_LLAMA,
        HYPENET,
        MAMBA3,
        *lara.families(),
    ),
    "family",
    "FAMILIES",
)
"""Families by transformers' model_type, and those of systems."""
