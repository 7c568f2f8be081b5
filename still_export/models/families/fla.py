"""Models of flash-linear-attention: their configuration, and modules with their weights.

transformers has no classes for them; the mixers compute, on the stack of layers that all of them share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from still_export.mixers.layers import FULL
from still_export.models.families.stack import Stack, StackConfig

HGRN2_EPSILON = 1e-5
"""Epsilon of HGRN2's norm after the rule, for which flash-linear-attention ignores the configuration."""


@strict
class FlaConfig(StackConfig):
    """Settings of the layers, with transformers' names where it has them.

    Args:
        linear_conv_kernel_dim: Taps of the convolutions of queries, keys and values; 0: no convolutions.
        linear_gate: Activation of the output's gate, "silu" or "sigmoid"; None: no gate.
        allow_neg_eigval: beta is up to 2.
        sliding_window: Latest tokens that softmax layers see; None: all.
        clamp_min: Lower bound of GLA's decay; None: no bound.
        lower_bounds: HGRN2's layers after the first have a learned lower bound of the forget gate.
    """

    vocab_size: int = 32000
    hidden_size: int = 2048
    intermediate_size: int = 5632
    num_hidden_layers: int = 24
    num_attention_heads: int = 32
    num_key_value_heads: int = 32
    head_dim: int = 64
    attention_bias: bool = False
    sliding_window: int | None = None
    mlp_bias: bool = False
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    rope_parameters: dict[str, Any] | None = None
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


class GatedRMSNorm(LlamaRMSNorm):
    """RMSNorm of each row in float32, times the activated gate if there is one."""

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
        if queries:
            self.q_proj = nn.Linear(hidden, queries, bias=False)
        for name, outputs in zip(self.names, (keys, values), strict=True):
            self.add_module(name, nn.Linear(hidden, outputs, bias=False))
        if self.taps:
            channels = queries + keys + values
            self.conv1d = nn.Conv1d(channels, channels, self.taps, groups=channels, bias=False)
        self.o_proj = nn.Linear(self.outputs, hidden, bias=False)
        self.add_parts(config)

    def add_parts(self, config: Any) -> None:
        """Add the modules that only this kind has."""
        raise NotImplementedError

    def add_gate_and_norm(self, config: Any) -> None:
        if config.linear_gate is not None:
            self.g_proj = nn.Linear(config.hidden_size, self.outputs, bias=False)
        self.o_norm: nn.Module = GatedRMSNorm(self.head_v_dim, config.rms_norm_eps, config.linear_gate)


class FlaGatedDeltaNet(FlaMixer):
    def add_parts(self, config: Any) -> None:
        self.allow_neg_eigval: bool = config.allow_neg_eigval
        self.a_proj, self.b_proj = (nn.Linear(config.hidden_size, self.num_v_heads, bias=False) for _ in range(2))
        self.A_log, self.dt_bias = (nn.Parameter(torch.zeros(self.num_v_heads)) for _ in range(2))
        self.add_gate_and_norm(config)


class FlaDeltaNet(FlaMixer):
    def add_parts(self, config: Any) -> None:
        self.allow_neg_eigval: bool = config.allow_neg_eigval
        self.b_proj = nn.Linear(config.hidden_size, self.num_v_heads, bias=False)
        self.add_gate_and_norm(config)


class FlaGLA(FlaMixer):
    low_rank = 16

    def add_parts(self, config: Any) -> None:
        self.clamp_min: float | None = config.clamp_min
        keys = self.num_k_heads * self.head_k_dim
        self.gk_proj = nn.Sequential(
            nn.Linear(config.hidden_size, self.low_rank, bias=False), nn.Linear(self.low_rank, keys)
        )
        self.add_gate_and_norm(config)


class FlaHGRN2(FlaMixer):
    """HGRN2; `lower_bound` [H * D]: least value of the forget gate, in layers with a bound."""

    names = ("f_proj", "i_proj")

    def add_parts(self, config: Any) -> None:
        if config.lower_bounds and self.layer_idx > 0:
            self.lower_bound = nn.Parameter(torch.zeros(self.num_k_heads * self.head_k_dim))
        self.g_norm = GatedRMSNorm(config.hidden_size, HGRN2_EPSILON, None)


class FlaHGRN(FlaHGRN2):
    """HGRN (version 1), which has no queries."""

    def add_parts(self, config: Any) -> None:
        super().add_parts(config)
        self.g_proj = nn.Linear(config.hidden_size, self.outputs, bias=False)
        self.g_norm = GatedRMSNorm(self.outputs, config.rms_norm_eps, "silu")


class FlaRetNet(FlaMixer):
    def add_parts(self, config: Any) -> None:
        self.add_gate_and_norm(config)


class FlaAttention(nn.Module):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        sizes = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(config.hidden_size, heads * config.head_dim, bias=config.attention_bias) for heads in sizes
        )
        self.o_proj = nn.Linear(sizes[0] * config.head_dim, config.hidden_size, bias=False)


@dataclass(frozen=True)
class FlaKind:
    """A model_type of flash-linear-attention.

    Args:
        name: The model_type. title: Prefix of the names of its classes.
        mixer: The mixer of its linear layers.
        module: Class with the weights of a linear layer; arguments: configuration, layer number.
        heads: Computes the configuration's head sizes from config.json.
        defaults: Values of fields that config.json may omit.
        covered: Further settings of a config.json, with their supported values.
        names: Further pairs of name parts: in the checkpoint, in the model.
        turned: Its linear layers use positions.
        further: Mixer and module of further types of layers.
        fields: Further fields of the configuration: type and default.
    """

    name: str
    title: str
    mixer: str
    module: Callable[[Any, int], nn.Module]
    heads: Callable[[Mapping[str, Any]], dict[str, Any]]
    defaults: Mapping[str, Any]
    covered: Callable[[Mapping[str, Any]], dict[str, tuple[Any, ...]]] = lambda config: {}
    names: tuple[tuple[str, str], ...] = ()
    turned: bool = False
    further: Mapping[str, tuple[str, Callable[[Any, int], nn.Module]]] = field(default_factory=dict)
    fields: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)


KINDS: dict[str, FlaKind] = {}
"""By model_type; filled by `fla_families.fla_family`."""


class FlaBlock(nn.Module):
    """A layer: norm, mixer, norm, feed-forward, with two residual connections."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        own = KINDS[config.model_type.removeprefix("still_")]
        modules = {FULL: FlaAttention, **{name: module for name, (_, module) in own.further.items()}}
        kind = modules.get(config.layer_types[index], own.module)
        self.attn_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attn: nn.Module = kind(config, index)
        self.mlp_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(self, hidden: Tensor, cache: Any, **kwargs: Any) -> Tensor:
        mixed = self.attn(self.attn_norm(hidden), cache_params=cache, past_key_values=cache, **kwargs)
        hidden = hidden + (mixed[0] if isinstance(mixed, tuple) else mixed)
        return hidden + self.mlp(self.mlp_norm(hidden))


def fla_stack(config: Any) -> Stack:
    turned = FULL in config.layer_types or KINDS[config.model_type.removeprefix("still_")].turned
    rotary = LlamaRotaryEmbedding(config) if turned else None
    return Stack(config, FlaBlock, LlamaRMSNorm(config.hidden_size, config.rms_norm_eps), rotary)
