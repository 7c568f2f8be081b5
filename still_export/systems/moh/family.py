"""MoH-LLaMA3: Llama with three quarters of the heads per token. Its published folder has model_type "llama" and no trace of MoH in settings
or tensors: `linearize --mixer moh` converts it. A config.json with "moh_llama" is read directly."""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM

from still_export.mixers.config import LayersConfig
from still_export.models.families.linear_mixins import LinearConfigMixin, LlamaModelMixin, Place
from still_export.models.families.softmax_families import make_family
from still_export.systems.moh.mixer import head_counts


class MohConfigMixin(LinearConfigMixin):
    """Numbers of heads: by default half of them always, and half of the others."""

    def read_still(self) -> LayersConfig:
        config: Any = self
        config.layer_types = ["full_attention"] * config.num_hidden_layers
        config.shared_heads, config.routed_heads = head_counts(config)
        return super().read_still()


FAMILIES = (
    make_family(
        __name__,
        LlamaConfig,
        LlamaForCausalLM,
        (MohConfigMixin, LlamaModelMixin),
        title="MohLlama",
        name="moh_llama",
        linear=True,
        fields={
            "layer_types": (list[str] | None, None),
            "shared_heads": (int | None, None),
            "routed_heads": (int | None, None),
        },
        places={"full_attention": Place("chosen_heads", ("self_attn",))},
    ),
)
