"""Layers with states in pages of vLLM's memory. No vLLM."""

from __future__ import annotations

from typing import Any

import torch

from still_export.errors import ConfigError, UnsupportedModelError
from still_export.mixers.paged import PagedLayer, Pages
from still_export.mixers.registry import mixer_of

LINEAR_STATES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def paged_layers(config: Any, ranks: int = 1, rank: int = 0) -> list[PagedLayer | None]:
    """Each layer of the STILL family configuration `config` on one of `ranks`; None: vLLM's own attention computes it.

    Raises:
        UnsupportedModelError: All layers are softmax, one cannot be served, or pages cannot store the requested 8-bit keys and values.
    """
    layers = [mixer_of(config, i).paged(config, i, ranks, rank) for i in range(config.num_hidden_layers)]
    if not any(layers):
        raise UnsupportedModelError(
            "no layer of this STILL model is linearized: still_config.layer_types in config.json is softmax for each. Serve the "
            "base model, which vLLM supports itself."
        )
    if config.still.deployment.cache == "int8" and not all(layer.codes for layer in layers if layer is not None):
        raise UnsupportedModelError(
            "cache='int8' in config.json is for layers of STILL's hybrid attention; this model has others, which do not store 8 bits in "
            "vLLM. Leave it out, or serve the exported package with still-export serve."
        )
    return layers


def linear_state(cache: Any) -> torch.dtype:
    """Type of the linear states by vLLM's CacheConfig: --mamba-ssm-cache-dtype, or else --mamba-cache-dtype.

    Raises:
        ConfigError: Sums cannot be stored in this type.
    """
    names = (getattr(cache, f"mamba_{which}cache_dtype", "auto") for which in ("ssm_", ""))
    name = next((name for name in names if name != "auto"), "float32")
    if name not in LINEAR_STATES:
        raise ConfigError(
            f"--mamba-ssm-cache-dtype {name}: the linear state of a STILL model is stored in {' or '.join(LINEAR_STATES)}."
        )
    return LINEAR_STATES[name]


def common_pages(
    config: Any, tokens: int, dtype: torch.dtype, ranks: int = 1, linear: torch.dtype = torch.float32
) -> Pages:
    """Pages common to all layers with states, for requests of at most `tokens` tokens; the engine knows one page size.

    Args:
        linear: See `linear_state`.

    Raises:
        UnsupportedModelError: Sizes differ, a layer cannot store its linear state in this type, or see `paged_layers`.
    """
    capacity = config.still.deployment.capacity(config)
    layers = [layer for layer in paged_layers(config, ranks) if layer is not None]
    if not all(linear in layer.linear_states for layer in layers):
        raise UnsupportedModelError(
            "--mamba-ssm-cache-dtype bfloat16 is for layers of STILL's hybrid attention, which store the remainders of rounding; this "
            "model has others. Leave it out."
        )
    found = [layer.pages(tokens, capacity, dtype, linear) for layer in layers]
    if any(pages != found[0] for pages in found):
        raise UnsupportedModelError("the states of this model's layers differ in size; vLLM has one page size for all.")
    return found[0]
