"""MoH-LLaMA3: Llama of whose heads each token takes three quarters. Its published folder says "llama" and has code of its own; here its
config.json says "moh_llama"."""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM

from still_export.errors import ConfigError
from still_export.mixers.config import LayersConfig
from still_export.models.families.linear_mixins import LinearConfigMixin, LlamaModelMixin, Place
from still_export.models.families.softmax_families import make_family


class MohConfigMixin(LinearConfigMixin):
    """How many heads are taken: by default a half always, and half of the others."""

    def read_still(self) -> LayersConfig:
        config: Any = self
        config.layer_types = ["full_attention"] * config.num_hidden_layers
        heads = config.num_attention_heads
        config.shared_heads = heads // 2 if config.shared_heads is None else config.shared_heads
        config.routed_heads = heads // 4 if config.routed_heads is None else config.routed_heads
        if not (0 <= config.shared_heads and 1 <= config.routed_heads < heads - config.shared_heads):
            raise ConfigError(
                f"shared_heads={config.shared_heads} and routed_heads={config.routed_heads} in config.json of {heads} heads; some of those "
                "that are not shared must be taken, and not all. Fix them."
            )
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
