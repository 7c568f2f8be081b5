"""The families: a configuration and a model class each, made of transformers' own and the STILL mixins.

Classes are registered with transformers' Auto classes under model types of their own ("still_llama"), so a saved STILL model loads by
AutoModelForCausalLM without remote code, and a process that has not imported this package fails instead of running softmax.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from still_export.models.base import StillConfigMixin, StillModelMixin


@strict
class StillLlamaConfig(StillConfigMixin, LlamaConfig):
    """Llama, and all who share its architecture: SmolLM, SmolLM2, TinyLlama."""

    model_type = "still_llama"
    still_config: dict[str, Any] | None = None


@strict
class StillMistralConfig(StillConfigMixin, MistralConfig):
    """Mistral without an effective sliding window."""

    model_type = "still_mistral"
    sliding_window: int | None = None  # transformers makes a default configuration to print or write any
    still_config: dict[str, Any] | None = None


@strict
class StillQwen2Config(StillConfigMixin, Qwen2Config):
    """Qwen2 and Qwen2.5: biases on q, k and v."""

    model_type = "still_qwen2"
    still_config: dict[str, Any] | None = None


@strict
class StillQwen3Config(StillConfigMixin, Qwen3Config):
    """Qwen3: queries and keys are normed per head."""

    model_type = "still_qwen3"
    still_config: dict[str, Any] | None = None


@strict
class StillSmolLM3Config(StillConfigMixin, SmolLM3Config):
    """SmolLM3: some layers have no positions."""

    model_type = "still_smollm3"
    still_config: dict[str, Any] | None = None


class StillLlamaForCausalLM(StillModelMixin, LlamaForCausalLM):
    """Llama with hybrid attention."""

    config_class = StillLlamaConfig


class StillMistralForCausalLM(StillModelMixin, MistralForCausalLM):
    """Mistral with hybrid attention."""

    config_class = StillMistralConfig


class StillQwen2ForCausalLM(StillModelMixin, Qwen2ForCausalLM):
    """Qwen2 with hybrid attention."""

    config_class = StillQwen2Config


class StillQwen3ForCausalLM(StillModelMixin, Qwen3ForCausalLM):
    """Qwen3 with hybrid attention."""

    config_class = StillQwen3Config


class StillSmolLM3ForCausalLM(StillModelMixin, SmolLM3ForCausalLM):
    """SmolLM3 with hybrid attention."""

    config_class = StillSmolLM3Config


@dataclass(frozen=True)
class Family:
    """A family's plain and STILL classes; `name` is its model_type in transformers.

    linear: Its layers are linear already; such a model is exported as it is.
    """

    name: str
    config: type
    still_config: type
    still_model: type
    linear: bool = False


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("llama", LlamaConfig, StillLlamaConfig, StillLlamaForCausalLM),
        Family("mistral", MistralConfig, StillMistralConfig, StillMistralForCausalLM),
        Family("qwen2", Qwen2Config, StillQwen2Config, StillQwen2ForCausalLM),
        Family("qwen3", Qwen3Config, StillQwen3Config, StillQwen3ForCausalLM),
        Family("smollm3", SmolLM3Config, StillSmolLM3Config, StillSmolLM3ForCausalLM),
    )
}
"""Families by transformers' model_type."""

for _family in FAMILIES.values():
    AutoConfig.register(_family.still_config.model_type, _family.still_config)  # type: ignore[attr-defined]
    AutoModelForCausalLM.register(_family.still_config, _family.still_model)
