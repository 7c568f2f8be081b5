"""Kimi Linear and Ling: the gated delta rule in most layers, softmax attention to latents in the others."""

from __future__ import annotations

from transformers import BailingHybridConfig, BailingHybridForCausalLM, KimiLinearConfig, KimiLinearForCausalLM

from still_export.errors import UnsupportedModelError
from still_export.mixers.config import LayersConfig
from still_export.models.families.linear_mixins import LinearConfigMixin, LinearModelMixin, Place, linear_family

PLACES = {
    "linear_attention": Place("gated_delta_net", ("self_attn",)),
    "full_attention": Place("latent_attention", ("self_attn",)),
}


class KimiConfigMixin(LinearConfigMixin):
    """Names of sizes in Kimi Linear and Ling; refuses settings that are not covered."""

    linear_num_key_heads = linear_num_value_heads = property(lambda self: self.linear_num_heads)
    linear_key_head_dim = linear_value_head_dim = property(lambda self: self.linear_head_dim)

    def check(self, still: LayersConfig) -> None:
        super().check(still)
        if getattr(self, "mla_use_nope", True) is False:
            raise UnsupportedModelError(
                "mla_use_nope=false in config.json: attention to latents is covered without positions alone, as transformers has it."
            )


FAMILIES = (
    linear_family(__name__, KimiLinearConfig, KimiLinearForCausalLM, PLACES, (KimiConfigMixin, LinearModelMixin)),
    linear_family(__name__, BailingHybridConfig, BailingHybridForCausalLM, PLACES, (KimiConfigMixin, LinearModelMixin)),
)
