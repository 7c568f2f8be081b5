"""Softmax families: a configuration and a model class for each, combining transformers' classes with the STILL mixins.

Classes are registered with transformers' Auto classes under model types of their own ("still_llama"), so AutoModelForCausalLM
loads a saved STILL model without remote code. A process that has not imported this package fails instead of running softmax.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from still_export.models.base import StillConfigMixin, StillModelMixin
from still_export.models.families.gemma import GemmaConfigMixin, GemmaModelMixin


@dataclass(frozen=True)
class Published:
    """How a published folder becomes a family's model.

    values: Computes configuration values from config.json; None: the names are the same.
    names: Pairs of name parts: in the folder, in the model.
    tensors: Computes the model's tensors from the renamed ones, if some are computed from several.
    renamed: Renames a tensor, instead of `names`.
    moved: Like `tensors`, also with the configuration, for changes that keep all numbers, such as transposing or splitting.
    unused: The purpose of a tensor (by the model's name) that the model does not read with this configuration; "": it reads it.
    """

    values: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    names: tuple[tuple[str, str], ...] = ()
    tensors: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    renamed: Callable[[str], str] | None = None
    moved: Callable[[dict[str, Any], Mapping[str, Any]], dict[str, Any]] | None = None
    unused: Callable[[str, Mapping[str, Any]], str] | None = None


@dataclass(frozen=True)
class Family:
    """A family's plain and STILL classes; `name` is its model_type in transformers.

    linear: Its layers are linear; such a model is exported unchanged.
    """

    name: str
    config: type
    still_config: type
    still_model: type
    linear: bool = False
    published: Published = Published()


def make_family(
    module: str,
    config: Any,
    model: Any,
    mixins: tuple[type, type] = (StillConfigMixin, StillModelMixin),
    *,
    title: str = "",
    name: str = "",
    linear: bool = False,
    fields: Mapping[str, tuple[Any, Any]] | None = None,
    published: Published | None = None,
    **attributes: Any,
) -> Family:
    """Make and register a family's STILL classes, as attributes of `module`, where pickle finds them.

    Args:
        mixins: First bases of the STILL configuration and model.
        title, name: Names of the STILL classes and of the family; by default those of the plain classes.
        fields: Further fields of the STILL configuration: type and default.
        published: How folders with other names are read; None: names are transformers'.
        attributes: Class attributes of the STILL configuration.
    """
    name = name or config.model_type
    own = {"still_config": (dict[str, Any] | None, None), **(fields or {})}
    body = {"__annotations__": {field: kind for field, (kind, _) in own.items()}, "model_type": f"still_{name}"}
    body |= {field: default for field, (_, default) in own.items()} | attributes | {"__module__": module}
    configured: Any = type(f"Still{title + 'Config' if title else config.__name__}", (mixins[0], config), body)
    still_config = strict(configured)
    called = f"Still{title + 'ForCausalLM' if title else model.__name__}"
    still_model = type(called, (mixins[1], model), {"config_class": still_config, "__module__": module})
    for made in (still_config, still_model):
        setattr(sys.modules[module], made.__name__, made)
    AutoConfig.register(f"still_{name}", still_config)
    AutoModelForCausalLM.register(still_config, still_model)
    return Family(name, config, still_config, still_model, linear, published or Published())


class PhiModelMixin(StillModelMixin):
    """Llama's layers, some of them fused (`fused.py`), with partial rotary positions."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.rotary_emb = Phi3RotaryEmbedding(config)


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        make_family(__name__, LlamaConfig, LlamaForCausalLM),  # SmolLM, SmolLM2 and TinyLlama are Llama too
        # No window: transformers makes a default configuration to print or write any.
        make_family(__name__, MistralConfig, MistralForCausalLM, fields={"sliding_window": (int | None, None)}),
        make_family(__name__, Qwen2Config, Qwen2ForCausalLM),  # and Qwen2.5
        make_family(__name__, Qwen3Config, Qwen3ForCausalLM),
        make_family(__name__, Qwen3MoeConfig, Qwen3MoeForCausalLM),
        make_family(__name__, SmolLM3Config, SmolLM3ForCausalLM),
        make_family(
            __name__,
            Phi3Config,
            LlamaForCausalLM,
            (StillConfigMixin, PhiModelMixin),
            title="Phi3",
            fields={"attention_bias": (bool, False), "mlp_bias": (bool, False)},
            partial_rotation=True,
        ),
        make_family(__name__, Gemma3TextConfig, Gemma3ForCausalLM, (GemmaConfigMixin, GemmaModelMixin)),
    )
}
