"""A model's stateful layers in pages of vLLM's memory. No vLLM."""

from __future__ import annotations

from typing import Any

import torch

from still_export.errors import ConfigError, UnsupportedModelError
from still_export.mixers.paged import PagedLayer, Pages
from still_export.mixers.registry import mixer_of

LINEAR_STATES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def paged_layers(config: Any, ranks: int = 1, rank: int = 0) -> list[PagedLayer | None]:
    """Each layer of the model `config` on one of `ranks`; None if vLLM's own attention computes it.

    Raises:
        UnsupportedModelError: All are softmax, one is not served so, or one's pages cannot hold keys and values in 8 bits, as they should.
    """
    layers = [mixer_of(config, i).paged(config, i, ranks, rank) for i in range(config.num_hidden_layers)]
    if not any(layers):
        raise UnsupportedModelError(
            "no layer of this STILL model is linearized: still_config.layer_types in config.json says softmax for each. Serve the "
            "base model, which vLLM has itself."
        )
    if config.still.deployment.cache == "int8" and not all(layer.codes for layer in layers if layer is not None):
        raise UnsupportedModelError(
            "cache='int8' in config.json is for layers of STILL's hybrid attention; this model has others, which keep nothing in 8 bits in "
            "vLLM. Leave it out, or serve the exported package with still-export serve."
        )
    return layers


def linear_state(cache: Any) -> torch.dtype:
    """Type of linear states in vLLM's CacheConfig: --mamba-ssm-cache-dtype, by default --mamba-cache-dtype.

    Raises:
        ConfigError: A type that sums are not kept in.
    """
    names = (getattr(cache, f"mamba_{which}cache_dtype", "auto") for which in ("ssm_", ""))
    name = next((name for name in names if name != "auto"), "float32")
    if name not in LINEAR_STATES:
        raise ConfigError(
            f"--mamba-ssm-cache-dtype {name}: the linear state of a STILL model is kept in {' or '.join(LINEAR_STATES)}."
        )
    return LINEAR_STATES[name]


def common_pages(
    config: Any, tokens: int, dtype: torch.dtype, ranks: int = 1, linear: torch.dtype = torch.float32
) -> Pages:
    """The pages of each stateful layer, for requests of at most `tokens` tokens; the engine supports one size.

    Args:
        linear: See `linear_state`.

    Raises:
        UnsupportedModelError: They differ, a layer does not keep its linear state so, or see `paged_layers`.
    """
    capacity = config.still.deployment.capacity(config)
    layers = [layer for layer in paged_layers(config, ranks) if layer is not None]
    if not all(linear in layer.linear_states for layer in layers):
        raise UnsupportedModelError(
            "--mamba-ssm-cache-dtype bfloat16 is for layers of STILL's hybrid attention, whose promotions keep what rounding takes; this "
            "model has others. Leave it out."
        )
    found = [layer.pages(tokens, capacity, dtype, linear) for layer in layers]
    if any(pages != found[0] for pages in found):
        raise UnsupportedModelError(
            "the states of this model's layers differ in size; vLLM is given one page size for all."
        )
    return found[0]
