"""Mamba-2, Mamba and Falcon Mamba: such a layer alone, no softmax, no feed-forward layers; Jamba: Mamba in most layers, softmax in the
others."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import FalconMambaConfig, JambaConfig, JambaForCausalLM, Mamba2Config, MambaConfig
from transformers.models.falcon_mamba.modeling_falcon_mamba import FalconMambaBlock, FalconMambaRMSNorm
from transformers.models.mamba.modeling_mamba import MambaBlock, MambaRMSNorm
from transformers.models.mamba2.modeling_mamba2 import Mamba2Block, Mamba2RMSNorm

from still_export.mixers.layers import FULL
from still_export.models.families.linear_mixins import (
    LinearConfigMixin,
    LinearModelMixin,
    MambaModelMixin,
    Place,
    linear_family,
)
from still_export.models.families.stack import Stack, StackForCausalLM

FIELDS = {"max_position_embeddings": (int, 1 << 20)}
"""These models have no positions, so any context length is possible."""


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
    """With norms of the step, B and C."""

    block, norm = FalconMambaBlock, FalconMambaRMSNorm


class JambaConfigMixin(LinearConfigMixin):
    """`mamba_inner`: channels of its Mamba layers."""

    mamba_inner = property(lambda self: self.mamba_expand * self.hidden_size)


FAMILIES = (
    linear_family(
        __name__,
        Mamba2Config,
        StackForCausalLM,
        {"linear_attention": Place("mamba2", ("mixer",))},
        (LinearConfigMixin, Mamba2ModelMixin),
        title="Mamba2",
        fields=FIELDS,
        attribute_map={"num_attention_heads": "num_heads", "num_key_value_heads": "num_heads"},
    ),
    *(
        linear_family(
            __name__,
            config,
            StackForCausalLM,
            {"linear_attention": Place("mamba", ("mixer",))},
            (LinearConfigMixin, mixin),
            title=title,
            fields={**FIELDS, "num_attention_heads": (int, 1), "num_key_value_heads": (int, 1)},
        )
        for title, config, mixin in (
            ("Mamba", MambaConfig, Mamba1ModelMixin),
            ("FalconMamba", FalconMambaConfig, FalconMambaModelMixin),
        )
    ),
    linear_family(
        __name__,
        JambaConfig,
        JambaForCausalLM,
        {"linear_attention": Place("mamba", ("mamba",)), "full_attention": Place(FULL, ("self_attn",))},
        (JambaConfigMixin, LinearModelMixin),
    ),
)
