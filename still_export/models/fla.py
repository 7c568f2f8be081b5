"""Checkpoints of flash-linear-attention: their configuration under the names that ours have, and the modules that hold their weights.

transformers has no classes for them; the mixers compute, on the stack of layers that all of them share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from still_export.errors import ConfigError, UnsupportedModelError
from still_export.mixers.config import FULL
from still_export.models.stack import Stack

LINEAR = "linear_attention"
HGRN2_EPSILON = 1e-5
"""Of HGRN2's norm behind the rule: flash-linear-attention calls it without the configuration's."""


@strict
class FlaConfig(PreTrainedConfig):
    """What their layers have, under transformers' names where it has the like.

    Args:
        linear_conv_kernel_dim: Taps of the convolutions of queries, keys and values; 0: there are none.
        linear_gate: Activation of the output's gate, "silu" or "sigmoid"; None: there is none.
        allow_neg_eigval: beta is up to 2.
        clamp_min: Of GLA's decay; None: it is not clamped.
        lower_bounds: HGRN2's later layers forget no more than a bound that they learned.
    """

    vocab_size: int = 32000
    hidden_size: int = 2048
    intermediate_size: int = 5632
    num_hidden_layers: int = 24
    num_attention_heads: int = 32
    num_key_value_heads: int = 32
    head_dim: int = 64
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    max_position_embeddings: int = 2048
    rope_parameters: dict[str, Any] | None = None
    layer_types: list[str] | None = None
    tie_word_embeddings: bool = False
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    linear_num_key_heads: int = 4
    linear_num_value_heads: int = 4
    linear_num_query_heads: int = 4
    linear_key_head_dim: int = 256
    linear_value_head_dim: int = 512
    linear_conv_kernel_dim: int = 4
    linear_conv_activation: str = "silu"
    linear_gate: str | None = None
    allow_neg_eigval: bool = False
    clamp_min: float | None = None
    lower_bounds: bool = False


def translated(config: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a `FlaConfig` from a config.json of flash-linear-attention.

    Raises:
        ConfigError: A value that the model needs is missing, or values do not fit each other.
        UnsupportedModelError: A variant that is not covered.
    """
    kind = config["model_type"]
    refused: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("swish", "silu"),
        "attnres_block_size": (None,),
        "feature_map": (None,),
        "elementwise_affine": (True, None),
        "qk_norm": ("l2",),
        "qk_activation": ("silu",),
        "use_beta": (True,),
        "share_conv_kernel": (False,),
    }
    if kind in ("gated_deltanet", "delta_net"):
        refused["use_short_conv"] = (True,)
    for name, covered in refused.items():
        if name in config and config[name] not in covered:
            raise UnsupportedModelError(
                f"{name}={config[name]!r} in config.json of a {kind} model; covered: {' or '.join(map(repr, covered))}."
            )
    for name in ("hidden_size", "num_hidden_layers", "vocab_size"):
        if name not in config:
            raise ConfigError(f"config.json has no {name}. Fetch the model again.")
    given = _DEFAULTS[kind] | dict(config)
    hidden, ratio = given["hidden_size"], given.get("hidden_ratio") or 4
    kept = {name: config[name] for name in _KEPT if name in config}
    return {
        **kept,
        **_HEADS[kind](given),
        **_softmax(given),
        "intermediate_size": given.get("intermediate_size") or 256 * math.ceil(int(hidden * ratio * 2 / 3) / 256),
        "rms_norm_eps": given.get("norm_eps", 1e-6),
        "linear_conv_kernel_dim": given.get("conv_size", 4) if given["use_short_conv"] else 0,
        "allow_neg_eigval": given.get("allow_neg_eigval", False),
    }


_KEPT = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "max_position_embeddings",
    "initializer_range",
    "tie_word_embeddings",
    "use_cache",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "dtype",
    "torch_dtype",
)
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gated_deltanet": {"head_dim": 256, "num_heads": 6, "expand_v": 2.0, "use_short_conv": True, "use_gate": True},
    "delta_net": {"num_heads": 16, "expand_k": 1.0, "expand_v": 1.0, "use_short_conv": True, "use_gate": False},
    "gla": {"num_heads": 4, "expand_k": 0.5, "expand_v": 1.0, "use_short_conv": False, "use_output_gate": True},
    "hgrn2": {"expand_ratio": 128, "use_short_conv": False, "use_lower_bound": True},
}
"""What a config.json may leave out."""


def _gated_delta_net(given: Mapping[str, Any]) -> dict[str, Any]:
    heads, dim = given["num_heads"], given["head_dim"]
    gate = {"swish": "silu"}.get(given.get("output_gate_activation", "swish"), given.get("output_gate_activation"))
    return _sizes(heads, given.get("num_v_heads") or heads, dim, dim * given["expand_v"]) | {
        "linear_gate": gate if given["use_gate"] else None
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


_HEADS = {"gated_deltanet": _gated_delta_net, "delta_net": _delta_net, "gla": _gla, "hgrn2": _hgrn2}


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
        "sliding_window": found.get("window_size"),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(found.get("rope_theta") or 10000.0)},
    }


class GatedRMSNorm(LlamaRMSNorm):
    """Norm of each row, times an activation of its gate where there is one; in float32."""

    def __init__(self, size: int, eps: float, activation: str | None) -> None:
        super().__init__(size, eps)
        self.activation = activation

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        rows = x.to(wide)
        rows = rows * torch.rsqrt((rows * rows).mean(-1, keepdim=True) + self.variance_epsilon) * self.weight.to(wide)
        if gate is not None:
            gate = gate.to(wide)
            rows = rows * (gate.sigmoid() if self.activation == "sigmoid" else nn.functional.silu(gate))
        return rows.to(x.dtype)


class FlaMixer(nn.Module):
    """The weights of a layer's mixer under their names; a mixer of ours takes its place."""

    names: ClassVar[tuple[str, str]] = ("k_proj", "v_proj")
    """Projections to keys and to values."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx, self.activation = layer_idx, config.linear_conv_activation
        self.num_v_heads, self.num_k_heads = config.linear_num_value_heads, config.linear_num_key_heads
        self.num_q_heads = config.linear_num_query_heads
        self.head_k_dim, self.head_v_dim = config.linear_key_head_dim, config.linear_value_head_dim
        hidden, self.taps = config.hidden_size, config.linear_conv_kernel_dim
        queries, keys = self.num_q_heads * self.head_k_dim, self.num_k_heads * self.head_k_dim
        values = self.num_v_heads * self.head_v_dim
        self.outputs = self.head_v_dim * max(self.num_q_heads, self.num_v_heads)
        self.q_proj = nn.Linear(hidden, queries, bias=False)
        for name, outputs in zip(self.names, (keys, values), strict=True):
            self.add_module(name, nn.Linear(hidden, outputs, bias=False))
        if self.taps:
            channels = queries + keys + values
            self.conv1d = nn.Conv1d(channels, channels, self.taps, groups=channels, bias=False)
        self.o_proj = nn.Linear(self.outputs, hidden, bias=False)
        self.add_parts(config)

    def add_parts(self, config: Any) -> None:
        """What one kind has beside these."""
        raise NotImplementedError

    def add_gate_and_norm(self, config: Any) -> None:
        """A gate of the output, where there is one, and the norm of its heads."""
        if config.linear_gate is not None:
            self.g_proj = nn.Linear(config.hidden_size, self.outputs, bias=False)
        self.o_norm = GatedRMSNorm(self.head_v_dim, config.rms_norm_eps, config.linear_gate)


class FlaGatedDeltaNet(FlaMixer):
    """Of a Gated DeltaNet."""

    def add_parts(self, config: Any) -> None:
        self.allow_neg_eigval: bool = config.allow_neg_eigval
        self.a_proj, self.b_proj = (nn.Linear(config.hidden_size, self.num_v_heads, bias=False) for _ in range(2))
        self.A_log, self.dt_bias = (nn.Parameter(torch.zeros(self.num_v_heads)) for _ in range(2))
        self.add_gate_and_norm(config)


class FlaDeltaNet(FlaMixer):
    """Of a DeltaNet."""

    def add_parts(self, config: Any) -> None:
        self.allow_neg_eigval: bool = config.allow_neg_eigval
        self.b_proj = nn.Linear(config.hidden_size, self.num_v_heads, bias=False)
        self.add_gate_and_norm(config)


class FlaGLA(FlaMixer):
    """Of a GLA."""

    low_rank = 16

    def add_parts(self, config: Any) -> None:
        self.clamp_min: float | None = config.clamp_min
        keys = self.num_k_heads * self.head_k_dim
        self.gk_proj = nn.Sequential(
            nn.Linear(config.hidden_size, self.low_rank, bias=False), nn.Linear(self.low_rank, keys)
        )
        self.add_gate_and_norm(config)


class FlaHGRN2(FlaMixer):
    """Of an HGRN2; `lower_bound` [H * D] is what stays at least, in layers that have a bound."""

    names = ("f_proj", "i_proj")

    def add_parts(self, config: Any) -> None:
        if config.lower_bounds and self.layer_idx > 0:
            self.lower_bound = nn.Parameter(torch.zeros(self.num_k_heads * self.head_k_dim))
        self.g_norm = GatedRMSNorm(config.hidden_size, HGRN2_EPSILON, None)


class FlaAttention(nn.Module):
    """Of a softmax layer."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        sizes = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(config.hidden_size, heads * config.head_dim, bias=config.attention_bias) for heads in sizes
        )
        self.o_proj = nn.Linear(sizes[0] * config.head_dim, config.hidden_size, bias=False)


MIXERS: dict[str, type[FlaMixer]] = {
    "gated_deltanet": FlaGatedDeltaNet,
    "delta_net": FlaDeltaNet,
    "gla": FlaGLA,
    "hgrn2": FlaHGRN2,
}
"""By model_type."""


class FlaBlock(nn.Module):
    """A layer: norm, mixer, norm, feed-forward, each pair added to what goes in."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        softmax = config.layer_types[index] == FULL
        kind = FlaAttention if softmax else MIXERS[config.model_type.removeprefix("still_")]
        self.attn_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attn: nn.Module = kind(config, index)
        self.mlp_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(self, hidden: Tensor, cache: Any, **kwargs: Any) -> Tensor:
        """[B, T, channels] to the same; `cache` is a StillCache or None."""
        mixed = self.attn(self.attn_norm(hidden), cache_params=cache, past_key_values=cache, **kwargs)
        hidden = hidden + (mixed[0] if isinstance(mixed, tuple) else mixed)
        result: Tensor = hidden + self.mlp(self.mlp_norm(hidden))
        return result


def fla_stack(config: Any) -> Stack:
    """The layers of a model with the configuration `config`."""
    layers = [FlaBlock(config, index) for index in range(config.num_hidden_layers)]
    rotary = LlamaRotaryEmbedding(config) if FULL in config.layer_types else None
    return Stack(config, layers, LlamaRMSNorm(config.hidden_size, config.rms_norm_eps), rotary)
