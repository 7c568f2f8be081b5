"""Granite 4, Bamba and Nemotron-H: Mamba-2 in most layers, softmax in the others; Falcon-H1: both in each layer."""

from __future__ import annotations

from torch import Tensor
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    NemotronHConfig,
)
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHBlock, NemotronHRMSNorm

from still_export.mixers.layers import FULL
from still_export.models.families.linear_mixins import (
    LinearConfigMixin,
    LinearModelMixin,
    Place,
    linear_family,
    stack_family,
)
from still_export.models.families.stack import Stack

PLACES = {"linear_attention": Place("mamba2", ("mamba",)), "full_attention": Place(FULL, ("self_attn",))}


class GraniteModelMixin(LinearModelMixin):
    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden) / self.config.logits_scaling


class FalconModelMixin(LinearModelMixin):
    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden) * self.config.lm_head_multiplier


FAMILIES = (
    linear_family(
        __name__, GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM, PLACES, (LinearConfigMixin, GraniteModelMixin)
    ),
    linear_family(__name__, BambaConfig, BambaForCausalLM, PLACES),
    linear_family(
        __name__,
        FalconH1Config,
        FalconH1ForCausalLM,
        {"hybrid": Place("parallel_mamba2", ("mamba", "self_attn"))},
        (LinearConfigMixin, FalconModelMixin),
    ),
    stack_family(
        __name__,
        NemotronHConfig,
        lambda config: Stack(config, NemotronHBlock, NemotronHRMSNorm(config.hidden_size, config.layer_norm_epsilon)),
        title="NemotronH",
        name="nemotron_h",
        places={
            "linear_attention": Place("mamba2", ("mixer",)),
            "full_attention": Place(FULL, ("mixer",)),
            **dict.fromkeys(("mlp", "moe"), Place("feed_forward", ())),
        },
    ),
)
