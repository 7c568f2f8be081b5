"""Qwen3 with Flux Attention. Its published folder has model_type "qwen3" and its own code; here config.json has "flux_qwen3"."""

from __future__ import annotations

from typing import Any

from transformers import Qwen3Config, Qwen3ForCausalLM

from still_export.errors import ConfigError, UnsupportedModelError
from still_export.mixers.config import LayersConfig
from still_export.models.families.linear_mixins import LinearConfigMixin, LinearModelMixin, Place
from still_export.models.families.softmax_families import Published, make_family

COVERED: dict[str, tuple[Any, ...]] = {
    "toggle_type": ("streaming",),
    "retrieval_mode": ("full",),
    "pooling_mode": ("ctx_q",),
    "use_softmax": (True,),
    "enable_ada_sparsity": (True,),
}
"""Supported modes; others sample, read other blocks, or need to know which part of a prompt is the question."""


class FluxConfigMixin(LinearConfigMixin):
    """Checks of the settings. Prompts are fed whole, because a layer decides by all of one."""

    @property
    def feeding(self) -> dict[str, Any]:
        return {"whole_prompts": True}

    def check(self, still: LayersConfig) -> None:
        super().check(still)
        config: Any = self
        for name, covered in COVERED.items():
            if getattr(config, name) not in covered:
                raise UnsupportedModelError(
                    f"{name}={getattr(config, name)!r} in config.json of a flux_qwen3 model; covered: {covered[0]!r}."
                )
        if config.sink_size < 0 or config.local_window_size < 1 or config.pool_size < 1:
            raise ConfigError(
                f"sink_size={config.sink_size}, local_window_size={config.local_window_size} and pool_size={config.pool_size} in "
                "config.json; they must be at least 0, 1 and 1. Fix them."
            )


def _without_temperature(tensors: dict[str, Any]) -> dict[str, Any]:
    """Drop the temperature of the router's training."""
    return {name: x for name, x in tensors.items() if not name.endswith(".self_attn.mask_allocator.log_temp")}


FAMILIES = (
    make_family(
        __name__,
        Qwen3Config,
        Qwen3ForCausalLM,
        (FluxConfigMixin, LinearModelMixin),
        title="FluxQwen3",
        name="flux_qwen3",
        linear=True,
        published=Published(tensors=_without_temperature),
        fields={
            "toggle_type": (str, "streaming"),
            "retrieval_mode": (str, "full"),
            "pooling_mode": (str, "ctx_q"),
            "use_softmax": (bool, True),
            "enable_ada_sparsity": (bool, True),
            "sink_size": (int, 128),
            "local_window_size": (int, 1024),
            "pool_size": (int, 100),
        },
        places={"full_attention": Place("chosen_width", ("self_attn",))},
    ),
)
