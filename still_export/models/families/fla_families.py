"""flash-linear-attention's gated linear attention (GLA, RetNet, HGRN, HGRN2), delta rule (DeltaNet) and gated delta rule (Gated DeltaNet),
with softmax in some layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from operator import index
from typing import Any

from still_export.errors import ConfigError, UnsupportedModelError
from still_export.mixers.config import LayersConfig
from still_export.mixers.layers import FULL, MOST_ROWS, WINDOWED
from still_export.models.families.fla import (
    KINDS,
    FlaConfig,
    FlaDeltaNet,
    FlaGatedDeltaNet,
    FlaGLA,
    FlaHGRN,
    FlaHGRN2,
    FlaKind,
    FlaRetNet,
    fla_stack,
)
from still_export.models.families.linear_mixins import LinearConfigMixin, LinearModelMixin, Place, stack_family
from still_export.models.families.softmax_families import Family, Published
from still_export.models.families.stack import copied, demand_covered

LINEAR = "linear_attention"


def values(config: Mapping[str, Any]) -> dict[str, Any]:
    kind = KINDS[config["model_type"]]
    covered: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("swish", "silu"),
        "attnres_block_size": (None,),
        "feature_map": (None,),
        "elementwise_affine": (True, None),
        "qk_norm": ("l2",),
        "qk_activation": ("silu",),
        "use_beta": (True,),
        "share_conv_kernel": (False,),
        **kind.covered(config),
    }
    settings = {**kind.defaults, **config}
    demand_covered(f"a {kind.name}", settings, covered)
    hidden, ratio = settings["hidden_size"], settings.get("hidden_ratio") or 4
    return {
        **copied(config, *_COPIED),
        **_softmax(settings),
        **kind.heads(settings),
        "intermediate_size": settings.get("intermediate_size") or 256 * math.ceil(int(hidden * ratio * 2 / 3) / 256),
        "rms_norm_eps": settings.get("norm_eps", 1e-6),
        "linear_conv_kernel_dim": settings.get("conv_size", 4) if settings["use_short_conv"] else 0,
        "allow_neg_eigval": settings.get("allow_neg_eigval", False),
    }


_COPIED = ("model_type", "hidden_size", "num_hidden_layers", "max_position_embeddings", "initializer_range")


def gated_delta_net_heads(config: Mapping[str, Any]) -> dict[str, Any]:
    heads, dim = config["num_heads"], config["head_dim"]
    gate = {"swish": "silu"}.get(config.get("output_gate_activation", "swish"), config.get("output_gate_activation"))
    return head_sizes(heads, config.get("num_v_heads") or heads, dim, dim * config["expand_v"]) | {
        "linear_gate": gate if config["use_gate"] else None
    }


def delta_net_heads(config: Mapping[str, Any]) -> dict[str, Any]:
    heads, hidden = config["num_heads"], config["hidden_size"]
    found = head_sizes(heads, heads, hidden * config["expand_k"] / heads, hidden * config["expand_v"] / heads)
    return found | {"linear_gate": "silu" if config["use_gate"] else None}


def gla_heads(config: Mapping[str, Any]) -> dict[str, Any]:
    heads, hidden = config["num_heads"], config["hidden_size"]
    key_heads = config.get("num_kv_heads") or heads
    found = head_sizes(key_heads, key_heads, hidden * config["expand_k"] / heads, hidden * config["expand_v"] / heads)
    return found | {
        "linear_num_query_heads": heads,
        "linear_gate": "silu" if config["use_output_gate"] else None,
        "clamp_min": config.get("clamp_min"),
    }


def hgrn2_heads(config: Mapping[str, Any]) -> dict[str, Any]:
    hidden = config["hidden_size"]
    ratio = config["expand_ratio"] or hidden // config["num_heads"]  # expand_ratio has priority
    heads = hidden // ratio
    return head_sizes(heads, heads, ratio, hidden / heads) | {
        "linear_conv_activation": "none",
        "lower_bounds": config["use_lower_bound"],
    }


def hgrn_heads(config: Mapping[str, Any]) -> dict[str, Any]:
    channels = int(config["hidden_size"] * config["expand_ratio"])
    return head_sizes(channels, channels, 1, 1) | {
        "linear_num_query_heads": 0,
        "linear_conv_activation": "none",
        "lower_bounds": config["use_lower_bound"],
    }


def retnet_heads(config: Mapping[str, Any]) -> dict[str, Any]:
    sizes = delta_net_heads({**config, "use_gate": config["use_output_gate"]})
    turned: dict[str, Any] = {
        "head_dim": sizes["linear_key_head_dim"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }
    return sizes | turned


def head_sizes(key_heads: int, value_heads: int, dim: float, size: float) -> dict[str, Any]:
    """Configuration of linear heads with `dim` channels for keys and `size` for values."""
    if dim != int(dim) or size != int(size):
        raise ConfigError(
            f"config.json gives heads of {dim:g} keys and {size:g} values, which are no whole numbers. Fix head_dim, expand_k, expand_v "
            "or num_heads."
        )
    return {
        "linear_num_key_heads": key_heads,
        "linear_num_query_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": int(dim),
        "linear_value_head_dim": int(size),
    }


def _softmax(config: Mapping[str, Any]) -> dict[str, Any]:
    """Types of layers and sizes of softmax heads, from `attn`; without softmax layers, default sizes."""
    layers, found = config["num_hidden_layers"], config.get("attn")
    if not found:
        heads = config.get("num_heads") or 1  # HGRN2's may be left out
        return {
            "layer_types": [LINEAR] * layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "head_dim": max(1, config["hidden_size"] // heads),
        }
    if isinstance(found, list):
        if len(found) > 1:
            raise UnsupportedModelError(
                "attn in config.json describes several kinds of softmax layers; one kind is covered."
            )
        found = found[0]
    if found.get("qk_norm"):
        raise UnsupportedModelError("attn.qk_norm in config.json: softmax layers are covered without norms of heads.")
    return {
        "layer_types": [FULL if i in found["layers"] else LINEAR for i in range(layers)],
        "num_attention_heads": found["num_heads"],
        "num_key_value_heads": found.get("num_kv_heads") or found["num_heads"],
        "head_dim": config["hidden_size"] // found["num_heads"],
        "attention_bias": found.get("qkv_bias", False),
        "sliding_window": None if found.get("window_size") is None else index(found["window_size"]),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(found.get("rope_theta") or 10000.0)},
    }


class FlaConfigMixin(LinearConfigMixin):
    """Softmax layers have a window only if it is shorter than the capacity."""

    sliding_window: int | None

    def read_still(self) -> LayersConfig:
        still = super().read_still()
        window = self.sliding_window
        if window is None or (window >= still.deployment.capacity(self) and still.deployment.bounded):
            return still
        if not 1 <= window <= MOST_ROWS:
            raise ConfigError(f"attn.window_size={window} in config.json is outside 1..{MOST_ROWS}. Fix it.")
        return replace(still, layer_types=tuple(WINDOWED if name == FULL else name for name in still.layer_types or ()))


def fla_family(kind: FlaKind, module: str = __name__) -> Family:
    KINDS[kind.name] = kind
    mixers = {LINEAR: kind.mixer, FULL: FULL, **{name: mixer for name, (mixer, _) in kind.further.items()}}
    return stack_family(
        module,
        FlaConfig,
        fla_stack,
        (FlaConfigMixin, LinearModelMixin),
        title=kind.title,
        name=kind.name,
        fields=kind.fields,
        published=Published(values, (*NAMES, *kind.names)),
        places={name: Place(mixer, ("attn",)) for name, mixer in mixers.items()},
    )


NAMES = (("model.embeddings.", "model.embed_tokens."), (".attn.g_norm_swish_gate.", ".attn.o_norm."))
_NORM = ((".attn.g_norm.", ".attn.o_norm."),)


def _convolved(config: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    return {"use_short_conv": (True,)}


def _retnet(config: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """RetNet's supported settings: no checkpoint has softmax layers or shared key heads."""
    return {"attn": (None,), "num_kv_heads": (None, config.get("num_heads"))}


FAMILIES: tuple[Family, ...] = tuple(
    fla_family(kind)
    for kind in (
        FlaKind(
            "gla",
            "GLA",
            "gated_linear_attention",  # the gated rule with a decay per key channel
            FlaGLA,
            gla_heads,
            {"num_heads": 4, "expand_k": 0.5, "expand_v": 1.0, "use_short_conv": False, "use_output_gate": True},
            names=_NORM,
        ),
        FlaKind(
            "hgrn2",
            "HGRN2",
            "gated_linear_attention",  # the same, what is written follows from what is forgotten
            FlaHGRN2,
            hgrn2_heads,
            {"expand_ratio": 128, "use_short_conv": False, "use_lower_bound": True},
        ),
        FlaKind(
            "hgrn",
            "HGRN",
            "gated_linear_attention",  # the same in each channel by itself
            FlaHGRN,
            hgrn_heads,
            {"expand_ratio": 1, "use_short_conv": False, "use_lower_bound": True},
        ),
        FlaKind(
            "retnet",
            "RetNet",
            "gated_linear_attention",  # a decay of each head for all tokens
            FlaRetNet,
            retnet_heads,
            {
                "num_heads": 8,
                "expand_k": 1.0,
                "expand_v": 2.0,
                "hidden_ratio": 2,
                "use_short_conv": False,
                "use_output_gate": True,
            },
            _retnet,
            _NORM,
            turned=True,
        ),
        FlaKind(
            "delta_net",
            "DeltaNet",
            "delta_net",
            FlaDeltaNet,
            delta_net_heads,
            {"num_heads": 16, "expand_k": 1.0, "expand_v": 1.0, "use_short_conv": True, "use_gate": False},
            _convolved,
        ),
        FlaKind(
            "gated_deltanet",
            "GatedDeltaNet",
            "gated_delta_net",
            FlaGatedDeltaNet,
            gated_delta_net_heads,
            {"head_dim": 256, "num_heads": 6, "expand_v": 2.0, "use_short_conv": True, "use_gate": True},
            _convolved,
        ),
    )
)
