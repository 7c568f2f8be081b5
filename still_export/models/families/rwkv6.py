"""RWKV-5 (version 5.2) and RWKV-6 in every layer, as published: configuration, modules with the weights, families.

Each of their layers is two here, one that mixes tokens and one that mixes channels: both store the previous token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn

from still_export.errors import ConfigError, UnsupportedModelError
from still_export.models.families.linear_mixins import HeadlessConfigMixin, LinearModelMixin, Place, stack_family
from still_export.models.families.softmax_families import Published
from still_export.models.families.stack import Stack, StackConfig, copied, demand_covered
from still_export.models.read.weights import Deferred, Weight, value_of

_LAYER = re.compile(r"rwkv\.blocks\.(\d{1,6})\.(pre_ln|ln1|ln2|attention|feed_forward)\.")
_PARTS = {"pre_ln": "pre_norm", "ln1": "norm", "attention": "mixer", "ln2": "norm", "feed_forward": "mixer"}
_WHOLE = (("rwkv.embeddings.", "model.embed_tokens."), ("rwkv.ln_out.", "model.norm."))
_SHARES = {"key": "k", "value": "v", "receptance": "r", "gate": "g"}
_PRODUCTS = tuple(f".mixer.{name}" for name in ("time_maa_w1", "time_maa_w2", "time_decay_w1", "time_decay_w2"))
MIXED = "wkvrg"
"""Vectors that RWKV-6 mixes with the previous token's: decay, key, value, receptance, gate."""
WIDE = 4096
"""Least number of channels with which published models have low-rank parts of twice the rank."""


@strict
class Rwkv6Config(StackConfig):
    """Settings of its layers, with transformers' names where it has them.

    Args:
        ranks: Ranks of RWKV-6's token shift and decay; RWKV-5 has none.
        norm_eps: Epsilon of the layers' norms.
        head_eps: Epsilon of each head's norm.
    """

    vocab_size: int = 65536
    hidden_size: int = 2048
    intermediate_size: int = 7168
    num_hidden_layers: int = 48
    num_attention_heads: int = 32
    num_key_value_heads: int = 32
    head_dim: int = 64
    ranks: list[int] | None = None
    norm_eps: float = 1e-5
    head_eps: float = 64e-5


def values(config: Mapping[str, Any]) -> dict[str, Any]:
    kind, width, layers = str(config["model_type"]), int(config["hidden_size"]), int(config["num_hidden_layers"])
    other = next((name for name in ("proj_low_rank_dim", "expand_k") if name in config), None)
    if other:
        raise UnsupportedModelError(
            f"{other} in config.json of an {kind} model: flash-linear-attention's form. Covered: the form of RWKV's own folders."
        )
    demand_covered(f"an {kind}", config, {"attention_hidden_size": (None, width)})
    dim = int(config.get("head_size", 64))
    if width % dim:
        raise ConfigError(f"hidden_size={width} in config.json is no multiple of head_size={dim}. Fix one of them.")
    wide = 1 + (width >= WIDE)
    ranks = [int(config.get("time_mix_rank", 32 * wide)), int(config.get("time_decay_rank", 64 * wide))]
    epsilon = float(config.get("layer_norm_epsilon", 1e-5))
    return {
        **copied(config, "initializer_range"),
        "model_type": kind,
        "hidden_size": width,
        "intermediate_size": int(config.get("intermediate_size") or width * 7 // 2 // 32 * 32),
        "num_hidden_layers": 2 * layers,
        "num_attention_heads": width // dim,
        "num_key_value_heads": width // dim,
        "head_dim": dim,
        "ranks": ranks if kind == "rwkv6" else None,
        "norm_eps": epsilon,
        "head_eps": epsilon * float(config.get("head_size_divisor", 8)) ** 2,
        "layer_types": ["linear_attention", "conv"] * layers,
    }


def renamed(name: str) -> str:
    def place(match: re.Match[str]) -> str:
        part = match[2]
        return f"model.layers.{2 * int(match[1]) + (part in ('ln2', 'feed_forward'))}.{_PARTS[part]}."

    for old, new in _WHOLE:
        name = name.replace(old, new)
    start, _, share = _LAYER.sub(place, name).rpartition(".")
    if share.startswith("time_mix_"):
        share = f"x_{_SHARES.get(share.removeprefix('time_mix_'), share)}"
    elif share == "time_maa_x":
        share = "x_all"
    elif re.fullmatch("time_maa_[wkvrg]", share):
        share = f"x_{share[-1]}"
    return f"lm_head.{share}" if start == "head" else f"{start}.{share}"


def linear(tensors: dict[str, Weight], config: Mapping[str, Any]) -> dict[str, Weight]:
    """Transpose RWKV-6's low-rank matrices [in, out] to linear layers."""
    for name in [n for n in tensors if n.endswith(_PRODUCTS)]:
        whole, start = tensors.pop(name), name.rpartition(".")[0]
        if name.endswith("time_maa_w2"):
            for number, part in enumerate(MIXED):
                tensors[f"{start}.mix_{part}.weight"] = turned(whole, whole.shape[1:], number)
        else:
            layer = {"time_maa_w1": "mix_in", "time_decay_w1": "decay_in", "time_decay_w2": "decay_out"}
            tensors[f"{start}.{layer[name.rpartition('.')[2]]}.weight"] = turned(whole, whole.shape)
    return tensors


def turned(whole: Weight, shape: torch.Size, number: int | None = None) -> Deferred:
    """A matrix [in, out] of size `shape`, or matrix `number` of a stack, transposed to the weight of a linear layer."""
    return Deferred(torch.Size(reversed(shape)), whole.dtype, partial(_transposed, whole, number))


def _transposed(whole: Weight, number: int | None) -> Tensor:
    value = value_of(whole)
    return (value if number is None else value[number]).T.contiguous()


class Rwkv6TimeMix(nn.Module):
    """Weights of token mixing under published names; a mixer replaces the module. `ranks` are None for RWKV-5."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx, self.heads, self.ranks = layer_idx, config.num_attention_heads, config.ranks
        width = config.hidden_size
        for name in "kvrg" if self.ranks is None else ("all", *MIXED):
            self.register_parameter(f"x_{name}", nn.Parameter(torch.zeros(1, 1, width)))
        self.time_faaaa = nn.Parameter(torch.zeros(self.heads, config.head_dim))
        self.receptance, self.key, self.value, self.gate, self.output = (
            nn.Linear(width, width, bias=False) for _ in range(5)
        )
        if self.ranks is None:
            self.time_decay = nn.Parameter(torch.zeros(self.heads, config.head_dim))
        else:
            mix, decay = self.ranks
            self.time_decay = nn.Parameter(torch.zeros(1, 1, width))
            self.mix_in = nn.Linear(width, len(MIXED) * mix, bias=False)
            for name in MIXED:
                self.add_module(f"mix_{name}", nn.Linear(mix, width, bias=False))
            self.decay_in, self.decay_out = (
                nn.Linear(*sizes, bias=False) for sizes in ((width, decay), (decay, width))
            )
        self.ln_x = nn.GroupNorm(self.heads, width, eps=config.head_eps)


class Rwkv6ChannelMix(nn.Module):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx, self.ranks = layer_idx, config.ranks
        width, inner = config.hidden_size, config.intermediate_size
        self.x_k, self.x_r = (nn.Parameter(torch.zeros(1, 1, width)) for _ in range(2))
        self.key = nn.Linear(width, inner, bias=False)
        self.receptance = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(inner, width, bias=False)


class Rwkv6Block(nn.Module):
    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        self.pre_norm = nn.LayerNorm(config.hidden_size, config.norm_eps) if index == 0 else None
        self.norm = nn.LayerNorm(config.hidden_size, config.norm_eps)
        self.mixer: nn.Module = (Rwkv6ChannelMix if index % 2 else Rwkv6TimeMix)(config, index)

    def forward(self, hidden: Tensor, cache: Any, **kwargs: Any) -> Tensor:
        hidden = hidden if self.pre_norm is None else self.pre_norm(hidden)
        return hidden + self.mixer(self.norm(hidden), cache)


FAMILIES = tuple(
    stack_family(
        __name__,
        Rwkv6Config,
        lambda config: Stack(config, Rwkv6Block, nn.LayerNorm(config.hidden_size, config.norm_eps)),
        (HeadlessConfigMixin, LinearModelMixin),
        title=name.title(),
        published=Published(values, renamed=renamed, moved=linear),
        places=dict.fromkeys(("linear_attention", "conv"), Place("rwkv6", ("mixer",))),
    )
    for name in ("rwkv5", "rwkv6")
)
