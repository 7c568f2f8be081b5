"""The config.json of a checkpoint of flash-linear-attention under the names that our configuration has, and what of it is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from operator import index
from typing import Any

from still_export.errors import ConfigError, UnsupportedModelError
from still_export.mixers.layers import FULL
from still_export.models.families.fla import NATS, ROUTED
from still_export.models.families.stack import demand_covered, kept
from still_kernels.routed_attention.spec import ROUTED_CHUNK

LINEAR = "linear_attention"


def values(config: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a `FlaConfig` from a config.json of flash-linear-attention; errors as of `language_model`."""
    kind = config["model_type"]
    refused: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("swish", "silu"),
        "attnres_block_size": (None,),
        "feature_map": (None,),
        "elementwise_affine": (True, None),
        "qk_norm": (True, False) if kind == "parallax" else ("l2",),
        "qk_activation": ("silu",),
        "use_beta": (True,),
        "share_conv_kernel": (False,),
    }
    if kind in ("parallax", "local_linear"):
        refused |= {"window_size": (None,), "attn": (None,)}
    if kind in ("gated_deltanet", "delta_net"):
        refused["use_short_conv"] = (True,)
    if kind == NATS:
        refused |= _NATS_COVERED | {"num_v_heads": (None, config.get("num_heads"))}
    if (
        kind == "retnet"
    ):  # of softmax layers, whose heads are turned otherwise, and of heads that share keys there is no checkpoint
        refused |= {"attn": (None,), "num_kv_heads": (None, config.get("num_heads"))}
    given = _DEFAULTS[kind] | dict(config)
    demand_covered(f"a {kind}", given, refused)
    hidden, ratio = given["hidden_size"], given.get("hidden_ratio") or 4
    return {
        **kept(config, *_KEPT),
        **_softmax(given),
        **_HEADS[kind](given),
        "intermediate_size": given.get("intermediate_size") or 256 * math.ceil(int(hidden * ratio * 2 / 3) / 256),
        "rms_norm_eps": given.get("norm_eps", 1e-6),
        "linear_conv_kernel_dim": given.get("conv_size", 4) if given["use_short_conv"] else 0,
        "allow_neg_eigval": given.get("allow_neg_eigval", False),
    }


_KEPT = ("model_type", "hidden_size", "num_hidden_layers", "max_position_embeddings", "initializer_range")
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gated_deltanet": {"head_dim": 256, "num_heads": 6, "expand_v": 2.0, "use_short_conv": True, "use_gate": True},
    "delta_net": {"num_heads": 16, "expand_k": 1.0, "expand_v": 1.0, "use_short_conv": True, "use_gate": False},
    "gla": {"num_heads": 4, "expand_k": 0.5, "expand_v": 1.0, "use_short_conv": False, "use_output_gate": True},
    "hgrn2": {"expand_ratio": 128, "use_short_conv": False, "use_lower_bound": True},
    "hgrn": {"expand_ratio": 1, "use_short_conv": False, "use_lower_bound": True},
    "retnet": {
        "num_heads": 8,
        "expand_k": 1.0,
        "expand_v": 2.0,
        "hidden_ratio": 2,
        "use_short_conv": False,
        "use_output_gate": True,
    },
    NATS: {
        "head_dim": 256,
        "num_heads": 6,
        "num_attn_heads": 12,
        "expand_v": 2.0,
        "use_short_conv": True,
        "use_gate": True,
        "attn_with_short_conv": False,
        "attn_apply_pos_encoding": True,
    },
    "parallax": {"num_heads": 32, "use_short_conv": False},
    "local_linear": {"num_heads": 32, "use_short_conv": False},
}
"""What a config.json may leave out."""
_NATS_COVERED: dict[str, tuple[Any, ...]] = {
    "nats_block_size": (ROUTED_CHUNK,),
    "n_ops": (2,),
    "nats_block_agg_type": ("mean",),
    "nats_sample_strategy": ("argmax",),
    "ops_for_incomplete_chunks": ("all",),
    "incomplete_block_start_with_ht": (True,),
    "outputs_are_wighted": (True,),  # as its authors spell it
    "use_gate": (True,),
    "use_short_conv": (True,),
    "conv_bias": (False,),
    "attn_with_short_conv": (True,),
    "attn_apply_pos_encoding": (False,),
    "attn": (None,),
}
"""Of NAtS-L's settings."""


def _gated_delta_net(given: Mapping[str, Any]) -> dict[str, Any]:
    heads, dim = given["num_heads"], given["head_dim"]
    gate = {"swish": "silu"}.get(given.get("output_gate_activation", "swish"), given.get("output_gate_activation"))
    return _sizes(heads, given.get("num_v_heads") or heads, dim, dim * given["expand_v"]) | {
        "linear_gate": gate if given["use_gate"] else None
    }


def _nats(given: Mapping[str, Any]) -> dict[str, Any]:
    heads, softmax, sizes = given["num_heads"], given["num_attn_heads"], _gated_delta_net(given)
    routes = given.get("num_nats_head") or heads
    keys, values = (heads * sizes[f"linear_{x}_head_dim"] for x in ("key", "value"))
    if heads % routes or softmax % routes or keys % softmax or values % softmax:
        raise ConfigError(
            f"num_nats_head={routes} in config.json must divide num_heads={heads} and num_attn_heads={softmax}, which must divide "
            f"{keys} channels of keys and {values} of values. Fix one of them."
        )
    plain = set(given.get("gdn_layers") or ())
    return sizes | {
        "layer_types": [LINEAR if i in plain else ROUTED for i in range(given["num_hidden_layers"])],
        "num_attention_heads": softmax,
        "num_key_value_heads": softmax,
        "head_dim": max(keys, values) // softmax,
        "qk_norm": given.get("attn_qk_norm", False),
        "routes": routes,
        "keep_decay": given.get("decay_for_non_gdn_blocks", False),
    }


def _delta_net(given: Mapping[str, Any]) -> dict[str, Any]:
    heads, hidden = given["num_heads"], given["hidden_size"]
    sizes = _sizes(heads, heads, hidden * given["expand_k"] / heads, hidden * given["expand_v"] / heads)
    return sizes | {"linear_gate": "silu" if given["use_gate"] else None}


def _gla(given: Mapping[str, Any]) -> dict[str, Any]:
    heads, hidden = given["num_heads"], given["hidden_size"]
    kept = given.get("num_kv_heads") or heads
    sizes = _sizes(kept, kept, hidden * given["expand_k"] / heads, hidden * given["expand_v"] / heads)
    return sizes | {
        "linear_num_query_heads": heads,
        "linear_gate": "silu" if given["use_output_gate"] else None,
        "clamp_min": given.get("clamp_min"),
    }


def _hgrn2(given: Mapping[str, Any]) -> dict[str, Any]:
    hidden = given["hidden_size"]
    ratio = given["expand_ratio"] or hidden // given["num_heads"]  # which decides where both are given
    heads = hidden // ratio
    return _sizes(heads, heads, ratio, hidden / heads) | {
        "linear_conv_activation": "none",
        "lower_bounds": given["use_lower_bound"],
    }


def _hgrn(given: Mapping[str, Any]) -> dict[str, Any]:
    channels = int(given["hidden_size"] * given["expand_ratio"])
    return _sizes(channels, channels, 1, 1) | {
        "linear_num_query_heads": 0,
        "linear_conv_activation": "none",
        "lower_bounds": given["use_lower_bound"],
    }


def _retnet(given: Mapping[str, Any]) -> dict[str, Any]:
    sizes = _delta_net({**given, "use_gate": given["use_output_gate"]})
    turned: dict[str, Any] = {
        "head_dim": sizes["linear_key_head_dim"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }
    return sizes | turned


def _parallax(given: Mapping[str, Any]) -> dict[str, Any]:
    heads = given["num_heads"]
    if given["hidden_size"] % heads:
        raise ConfigError(
            f"hidden_size={given['hidden_size']} in config.json is no multiple of num_heads={heads}. Fix one of them."
        )
    return {
        "num_key_value_heads": given.get("num_kv_heads") or heads,
        "attention_bias": given.get("qkv_bias", False),
        "qk_norm": given.get("qk_norm", False),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(given.get("rope_theta", 1e4))},
    }


def _local_linear(given: Mapping[str, Any]) -> dict[str, Any]:
    ridge, steps = float(given.get("ridge", 1.0)), index(given.get("ridge_steps", 32))
    if not 0 < ridge < math.inf or steps < 1:
        raise ConfigError(
            f"ridge={ridge:g} and ridge_steps={steps} in config.json; a ridge is above 0, as what is solved for may have no solution "
            "otherwise, and has at least 1 step. Fix them."
        )
    return _parallax(given) | {"ridge": ridge, "ridge_steps": steps}


_HEADS = {
    "gated_deltanet": _gated_delta_net,
    NATS: _nats,
    "delta_net": _delta_net,
    "gla": _gla,
    "hgrn2": _hgrn2,
    "hgrn": _hgrn,
    "retnet": _retnet,
    "parallax": _parallax,
    "local_linear": _local_linear,
}


def _sizes(key_heads: int, value_heads: int, dim: float, size: float) -> dict[str, Any]:
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


def _softmax(given: Mapping[str, Any]) -> dict[str, Any]:
    """Which layers are softmax attention, by `attn`, and its heads; without such layers heads as one would make them."""
    layers, found = given["num_hidden_layers"], given.get("attn")
    if not found:
        heads = given.get("num_heads") or 1  # HGRN2's may be left out
        return {
            "layer_types": [LINEAR] * layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "head_dim": max(1, given["hidden_size"] // heads),
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
        "head_dim": given["hidden_size"] // found["num_heads"],
        "attention_bias": found.get("qkv_bias", False),
        "sliding_window": None if found.get("window_size") is None else index(found["window_size"]),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(found.get("rope_theta") or 10000.0)},
    }
