"""Base classes of families with linear layers: places of mixers, configuration, model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import transformers

from still_export.errors import CheckpointError, UnsupportedModelError
from still_export.mixers.cache import hear_cache
from still_export.mixers.cache_layer import CACHE
from still_export.mixers.config import LayersConfig, StillConfig
from still_export.mixers.experts.module import swap_experts
from still_export.mixers.layers import WINDOWED
from still_export.mixers.registry import mixer_of
from still_export.models.base import StillConfigMixin, StillModelMixin
from still_export.models.families.softmax_families import Family, make_family
from still_export.models.families.stack import Stack, StackForCausalLM
from still_export.models.families.support import check_heads, check_rope, check_window


@dataclass(frozen=True)
class Place:
    """The mixer for a type of layer, and the names of the modules that it replaces: one, or several parallel ones."""

    mixer: str
    attributes: tuple[str, ...]


class LinearConfigMixin(StillConfigMixin):
    """Mixin for a family's configuration; `places` is keyed by the family's own `layer_types`."""

    places: ClassVar[dict[str, Place]]
    stored = LayersConfig

    def read_still(self) -> LayersConfig:
        types: list[str] | None = self.layer_types  # type: ignore[attr-defined]
        if types is None:
            raise CheckpointError("config.json names no layer_types, so its layers are unknown. Fetch the model again.")
        unknown = sorted(set(types) - set(self.places))
        if unknown:
            raise UnsupportedModelError(
                f"layer_types in config.json name {', '.join(unknown)}; covered for {self.model_type}: {', '.join(self.places)}."  # type: ignore[attr-defined]
            )
        still = StillConfig.from_dict(self.still_config or {})  # with settings of hybrid layers until version 0.1
        return LayersConfig(layer_types=tuple(self.places[name].mixer for name in types), deployment=still.deployment)

    def check(self, still: LayersConfig) -> None:
        check_heads(self)
        if WINDOWED in (still.layer_types or ()):
            check_window(self)
        if getattr(self, "rope_parameters", None) and getattr(self, "position_embedding_type", "rope") == "rope":
            check_rope(self, partial=True)


class HeadlessConfigMixin(LinearConfigMixin):
    """For families without softmax heads to check."""

    def check(self, still: LayersConfig) -> None:
        pass


class LinearModelMixin(StillModelMixin):
    """Mixin for a family's `...ForCausalLM`: replaced mixers, tensor-only cache, batches padded on either side."""

    def swap_mixers(self) -> None:
        config = self.config
        for index, layer in enumerate(self.model.layers):
            for name in config.places[config.layer_types[index]].attributes:
                setattr(layer, name, hear_cache(mixer_of(config, index).module(getattr(layer, name), config, index)))
            swap_experts(layer, config)


class LlamaModelMixin(LinearModelMixin):
    """Llama's base model accepts one mask, not one for each type of layer."""

    def decode(self, positions: Any, cache: Any, **kwargs: Any) -> Any:
        mask = self.model.embed_tokens.weight.new_zeros(1, 1, 1, 1)
        return self.model(
            attention_mask=mask, position_ids=positions, use_cache=cache is not None, **{CACHE: cache}, **kwargs
        )


class MambaModelMixin(LinearModelMixin):
    """For classes with "mamba" in their name."""

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Drops the second cache, which transformers makes for these classes."""
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)
        inputs.pop("cache_params", None)
        return inputs


def linear_family(
    module: str,
    config: Any,
    model: Any,
    places: Mapping[str, Place],
    mixins: tuple[type, type] = (LinearConfigMixin, LinearModelMixin),
    **more: Any,
) -> Family:
    """`make_family` for a class of transformers, with the places of its mixers."""
    return make_family(module, config, model, mixins, linear=True, places=places, **more)


def newer_families(
    module: str,
    classes: str,
    places: Mapping[str, Place],
    mixins: tuple[type, type] = (LinearConfigMixin, LinearModelMixin),
    **more: Any,
) -> tuple[Family, ...]:
    """`linear_family` for classes that the oldest transformers allowed lacks; empty where they are missing."""
    try:
        config, model = (getattr(transformers, classes + kind) for kind in ("Config", "ForCausalLM"))
    except AttributeError:
        return ()
    return (linear_family(module, config, model, places, mixins, **more),)


def stack_family(
    module: str,
    config: type,
    stack: Callable[[Any], Stack],
    mixins: tuple[type, type] = (LinearConfigMixin, LinearModelMixin),
    *,
    title: str,
    name: str = "",
    **more: Any,
) -> Family:
    """`make_family` for a model around the `Stack` that `stack` makes from a configuration; default name: the title in lower case."""
    model = type(f"{title}Stack", (StackForCausalLM,), {"stack": staticmethod(stack), "__module__": module})
    return make_family(module, config, model, mixins, title=title, name=name or title.lower(), linear=True, **more)
