"""A model's layers with states in pages of vLLM's memory. No vLLM."""

from __future__ import annotations

from typing import Any

import torch

from still_export.errors import UnsupportedModelError
from still_export.mixers.base import PagedLayer, Pages
from still_export.mixers.registry import mixer_of


def paged_layers(config: Any, ranks: int = 1, rank: int = 0) -> list[PagedLayer | None]:
    """Each layer of a model with the STILL family configuration `config` on one of `ranks`; None where vLLM's own attention computes it.

    Raises:
        UnsupportedModelError: All are softmax, one is not served so, or keys and values are to be kept in 8 bits.
    """
    if config.still.deployment.cache == "int8":
        raise UnsupportedModelError(
            "cache='int8' in config.json is not for vLLM, whose pages hold numbers here. Leave it out, or serve the exported package with "
            "still-export serve."
        )
    layers = [mixer_of(config, i).paged(config, i, ranks, rank) for i in range(config.num_hidden_layers)]
    if not any(layers):
        raise UnsupportedModelError(
            "no layer of this STILL model is linearized: still_config.layer_types in config.json says softmax for each. Serve the "
            "base model, which vLLM has itself."
        )
    return layers


def common_pages(config: Any, tokens: int, dtype: torch.dtype, ranks: int = 1) -> Pages:
    """The pages of every layer that has some, for requests of at most `tokens` tokens; the engine knows one size.

    Raises:
        UnsupportedModelError: They differ, or as of `paged_layers`.
    """
    capacity = config.still.deployment.capacity(config)
    found = [layer.pages(tokens, capacity, dtype) for layer in paged_layers(config, ranks) if layer is not None]
    if any(pages != found[0] for pages in found):
        raise UnsupportedModelError(
            "the states of this model's layers differ in size; vLLM is given one page size for all."
        )
    return found[0]
