"""Llama with landmark attention: a landmark token after every few tokens, which the runner inserts (`feeding`)."""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM

from still_export.errors import ConfigError, UnsupportedModelError
from still_export.mixers.config import LayersConfig
from still_export.mixers.layers import head_size
from still_export.models.families.linear_mixins import LinearConfigMixin, LlamaModelMixin, Place
from still_export.models.families.softmax_families import make_family


class LandmarkConfigMixin(LinearConfigMixin):
    """Block sizes, and checks of the settings."""

    @property
    def retrieval(self) -> dict[str, Any]:
        config: Any = self
        base = float(config.rope_parameters["rope_theta"])
        return {"block_tokens": config.mem_freq + 1, "top_blocks": config.cache_top_k or 0, "rope_base": base}

    @property
    def feeding(self) -> dict[str, Any]:
        config: Any = self
        return {"inserted": {"every": config.mem_freq, "id": config.mem_id}}

    def read_still(self) -> LayersConfig:
        config: Any = self
        config.layer_types = ["full_attention"] * config.num_hidden_layers
        return super().read_still()

    def check(self, still: LayersConfig) -> None:
        super().check(still)
        config: Any = self
        if config.cache_top_k is not None and config.cache_top_k < 1:
            raise UnsupportedModelError(
                f"cache_top_k={config.cache_top_k} in config.json of a llama_with_landmark model; at least 1, or null: every block is read."
            )
        kind = config.rope_parameters.get("rope_type", "default")
        if config.cache_top_k and (kind != "default" or head_size(config) % 2):
            raise UnsupportedModelError(
                f"cache_top_k={config.cache_top_k} beside rope_type={kind!r} and heads of {head_size(config)} in config.json; blocks that "
                "are read get new positions, which needs default rope and even heads. Leave cache_top_k out."
            )
        if not config.include_landmark_in_loss:
            raise UnsupportedModelError(
                "include_landmark_in_loss=false in config.json of a llama_with_landmark model; covered: true, which makes a landmark's "
                "logits those of the token after it."
            )
        if config.mem_freq < 1 or not 0 <= config.mem_id < config.vocab_size:
            raise ConfigError(
                f"mem_freq={config.mem_freq} and mem_id={config.mem_id} in config.json; a landmark comes after at least 1 token, and is "
                f"one of the {config.vocab_size} of the vocabulary. Fix them."
            )


FAMILIES = (
    make_family(
        __name__,
        LlamaConfig,
        LlamaForCausalLM,
        (LandmarkConfigMixin, LlamaModelMixin),
        title="LlamaLandmark",
        name="llama_with_landmark",
        linear=True,
        fields={
            "layer_types": (list[str] | None, None),
            "mem_id": (int, 32001),
            "mem_freq": (int, 50),
            "train_context_length": (int, 512),
            "include_landmark_in_loss": (bool, True),
            "cache_top_k": (int | None, None),
        },
        places={"full_attention": Place("landmark_attention", ("self_attn",))},
    ),
)
