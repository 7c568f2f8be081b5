"""Parallax models in flash-linear-attention's format, and local linear attention in a format of this project."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import nn

from still_export.errors import ConfigError
from still_export.models.families.fla import FlaAttention, FlaKind, GatedRMSNorm
from still_export.models.families.fla_families import fla_family

HEAD_EPSILON = 1e-5
"""Epsilon of Parallax' head norms: flash-linear-attention does not pass the configuration's."""


class FlaLocalLinear(FlaAttention):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.ridge = config.ridge


class FlaParallax(FlaLocalLinear):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.r_proj = nn.Linear(config.hidden_size, self.q_proj.out_features, bias=config.attention_bias)
        if config.qk_norm:
            for name in ("q_norm", "r_norm", "k_norm"):
                self.add_module(name, GatedRMSNorm(config.head_dim, HEAD_EPSILON, None))


def parallax_heads(config: Mapping[str, Any]) -> dict[str, Any]:
    heads = config["num_heads"]
    if config["hidden_size"] % heads:
        raise ConfigError(
            f"hidden_size={config['hidden_size']} in config.json is no multiple of num_heads={heads}. Fix one of them."
        )
    return {
        "num_key_value_heads": config.get("num_kv_heads") or heads,
        "attention_bias": config.get("qkv_bias", False),
        "qk_norm": config.get("qk_norm", False),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(config.get("rope_theta", 1e4))},
    }


def local_linear_heads(config: Mapping[str, Any]) -> dict[str, Any]:
    ridge = float(config.get("ridge", 1.0))
    if not 0 < ridge < math.inf:
        raise ConfigError(
            f"ridge={ridge:g} in config.json; a ridge must be above 0, or the equations may have no solution. Fix it."
        )
    return parallax_heads(config) | {"ridge": ridge}


def _covered(config: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    return {"window_size": (None,), "attn": (None,)}


def _parallax_covered(config: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    return {**_covered(config), "qk_norm": (True, False)}


FIELDS = {"qk_norm": (bool, False), "ridge": (float, 0.0)}
"""Whether Parallax norms queries, corrections and keys; the ridge of local linear attention."""
DEFAULTS = {"num_heads": 32, "use_short_conv": False}
FAMILIES = tuple(
    fla_family(
        FlaKind(name, title, "local_linear_attention", module, heads, DEFAULTS, covered, turned=True, fields=FIELDS),
        __name__,
    )
    for name, title, module, heads, covered in (
        ("parallax", "Parallax", FlaParallax, parallax_heads, _parallax_covered),
        ("local_linear", "LocalLinear", FlaLocalLinear, local_linear_heads, _covered),
    )
)
