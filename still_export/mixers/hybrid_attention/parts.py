"""Parts of hybrid attention that an evaluation switches off."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from still_export.mixers.hybrid_attention.module import StillAttention

CHANGES: dict[str, dict[str, Any]] = {
    "no_salient_tokens": {"salient_per_chunk": 0},
    "no_linear_part": {"feature_map": "relu"},
    "window_only": {"salient_per_chunk": 0, "feature_map": "relu"},
    "no_norm_preserving_map": {"feature_map": "softmax_pm"},
}
PARTS = tuple(CHANGES)
NO_FEATURES = ("no_linear_part", "window_only")
"""Parts without which linear terms are nothing: features that are relu of a zero projection."""


@contextlib.contextmanager
def without(model: nn.Module, part: str) -> Iterator[None]:
    """`model` without a part inside the block.

    no_salient_tokens: k = 0, all tokens beyond the window are linear. no_linear_part: the window and the salient tokens alone.
    window_only: neither. no_norm_preserving_map: the same directions, without the norm of queries and keys.
    """
    modules = [m for m in model.modules() if isinstance(m, StillAttention)]
    before, change = [(m.still, m.feature_q_weight, m.feature_k_weight) for m in modules], CHANGES[part]
    if part == "no_norm_preserving_map" and any(m.still.feature_map != "np_softmax_pm" for m in modules):
        change = {}
    for module in modules:
        module.still = replace(module.still, **change)
        if part in NO_FEATURES:
            module.feature_q_weight = nn.Parameter(torch.zeros_like(module.feature_q_weight))
            module.feature_k_weight = nn.Parameter(torch.zeros_like(module.feature_k_weight))
    config: Any = model.config
    stored = config.still_config
    by_layer = None if "salient_per_chunk" in change else config.still.salient_by_layer
    config.still_config = replace(config.still, **change, salient_by_layer=by_layer).to_dict()  # what caches hold
    try:
        yield
    finally:
        config.still_config = stored
        for module, (still, query, key) in zip(modules, before, strict=True):
            module.still, module.feature_q_weight, module.feature_k_weight = still, query, key
