"""RWKV-7 in every layer, as in flash-linear-attention: configuration, modules with the weights, family.

Each of its layers is two here, one that mixes tokens and one that mixes channels: both store the previous token.
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

_LAYER = re.compile(r"model\.layers\.(\d{1,6})\.(pre_norm|attn|attn_norm|ffn|ffn_norm)\.")
_PARTS = {"attn": "mixer", "attn_norm": "norm", "ffn": "mixer", "ffn_norm": "norm", "pre_norm": "pre_norm"}
_RANKS = {"decay": 64, "gate": 128, "a": 64, "v": 16}


@strict
class Rwkv7Config(StackConfig):
    """Settings of its layers, with transformers' names where it has them.

    Args:
        ranks: Ranks of decay, gate, correction rate, and share of the first layer's values.
        norm_first: Embeddings are normalized.
        key_epsilon: Added to the squared length of keys before the root.
    """

    vocab_size: int = 32000
    hidden_size: int = 2048
    intermediate_size: int = 8192
    num_hidden_layers: int = 48
    num_attention_heads: int = 32
    num_key_value_heads: int = 32
    head_dim: int = 64
    ranks: list[int] | None = None
    norm_first: bool = True
    norm_bias: bool = True
    norm_eps: float = 1e-5
    key_epsilon: float = 1e-6


def values(config: Mapping[str, Any]) -> dict[str, Any]:
    named = config.get("hidden_size")
    value_dim = config.get("value_dim") or named
    if any(size != named for size in (value_dim if isinstance(value_dim, list) else [value_dim])):
        raise UnsupportedModelError(
            f"value_dim={value_dim} in config.json of an rwkv7 model; covered: hidden_size={named}."
        )
    demand_covered("an rwkv7", config, {"hidden_act": ("sqrelu",), "attn": (None,)})
    width, layers = int(config["hidden_size"]), int(config.get("num_hidden_layers", 24))
    dim = config.get("head_dim", None if config.get("num_heads") else 64)
    dim = width // config["num_heads"] if dim is None else int(dim)
    if width % dim:
        raise ConfigError(f"hidden_size={width} in config.json is no multiple of head_dim={dim}. Fix one of them.")
    inner = config.get("intermediate_size") or 32 * -(-int(width * (config.get("hidden_ratio") or 4)) // 32)
    return {
        **copied(config, "norm_first", "norm_bias", "norm_eps", "initializer_range"),
        "model_type": "rwkv7",
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": 2 * layers,
        "num_attention_heads": width // dim,
        "num_key_value_heads": width // dim,
        "head_dim": dim,
        "ranks": [int(config.get(f"{name}_low_rank_dim", default)) for name, default in _RANKS.items()],
        "key_epsilon": 1e-6 if config.get("fuse_norm", True) else 1e-24,
        "layer_types": ["linear_attention", "conv"] * layers,
    }


def renamed(name: str) -> str:
    def place(match: re.Match[str]) -> str:
        part = match[2]
        return f"model.layers.{2 * int(match[1]) + part.startswith('ffn')}.{_PARTS[part]}."

    return _LAYER.sub(place, name.replace("model.embeddings.", "model.embed_tokens.")).replace("_lora.lora.", "_lora.")


def apart(tensors: dict[str, Weight], config: Mapping[str, Any]) -> dict[str, Weight]:
    """Split the token-shift vectors, which version 1 of flash-linear-attention's layer stored as one tensor [6, C]."""
    for name in [n for n in tensors if n.endswith(".mixer.x_x")]:
        whole = tensors.pop(name)
        for number, part in enumerate("rwkvag"):
            read = partial(_row, whole, number)
            tensors[f"{name.removesuffix('x')}{part}"] = Deferred(
                torch.Size((1, 1, whole.shape[-1])), whole.dtype, read
            )
    return tensors


def _row(whole: Weight, number: int) -> Tensor:
    return value_of(whole)[number].reshape(1, 1, -1)


def low_rank(width: int, rank: int, activation: nn.Module, bias: bool = True, wide: int = 0) -> nn.Sequential:
    """Linear layers from `width` channels to `rank` and on to `wide` (0: `width`), with an activation between."""
    return nn.Sequential(nn.Linear(width, rank, bias=False), activation, nn.Linear(rank, wide or width, bias=bias))


class Rwkv7TimeMix(nn.Module):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx, self.heads, self.key_epsilon = layer_idx, config.num_attention_heads, config.key_epsilon
        width, (decay, gate, rate, share) = config.hidden_size, config.ranks
        for name in "rwkvag":
            self.register_parameter(f"x_{name}", nn.Parameter(torch.zeros(1, 1, width)))
        self.k_k, self.k_a = (nn.Parameter(torch.zeros(width)) for _ in range(2))
        self.r_k = nn.Parameter(torch.zeros(self.heads, width // self.heads))
        self.r_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.w_lora = low_rank(width, decay, nn.Tanh())
        self.a_lora = low_rank(width, rate, nn.Identity())
        self.g_lora = low_rank(width, gate, nn.Sigmoid(), bias=False)
        if layer_idx:
            self.v_lora = low_rank(width, share, nn.Identity())
        self.g_norm = nn.GroupNorm(self.heads, width, eps=config.head_dim * config.norm_eps)


class Rwkv7ChannelMix(nn.Module):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.x_k = nn.Parameter(torch.zeros(config.hidden_size))
        self.key = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.value = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)


class Rwkv7Block(nn.Module):
    """Norm and mixer with a residual connection. Later layers read the first layer's values, which are appended to the hidden states."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        self.width, self.mixes_tokens = config.hidden_size, index % 2 == 0

        def norm() -> nn.LayerNorm:
            return nn.LayerNorm(config.hidden_size, config.norm_eps, bias=config.norm_bias)

        self.pre_norm = norm() if index == 0 and config.norm_first else None
        self.norm = norm()
        self.mixer: nn.Module = (Rwkv7TimeMix if self.mixes_tokens else Rwkv7ChannelMix)(config, index)

    def forward(self, hidden: Tensor, cache: Any, **kwargs: Any) -> Tensor:
        """Hidden states [B, T, channels], after the first layer with its values [B, T, 2 channels]; `cache` is a StillCache or None."""
        hidden, first = hidden[..., : self.width], hidden[..., self.width :]
        hidden = hidden if self.pre_norm is None else self.pre_norm(hidden)
        mixed = self.mixer(self.norm(hidden), cache, first)
        if self.mixes_tokens:
            mixed, value = mixed
            first = first if first.shape[-1] else value
        return torch.cat((hidden + mixed, first), dim=-1)


class LastNorm(nn.LayerNorm):
    """Normalizes the hidden states and drops the appended values."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden[..., : self.normalized_shape[0]])


FAMILIES = (
    stack_family(
        __name__,
        Rwkv7Config,
        lambda config: Stack(config, Rwkv7Block, LastNorm(config.hidden_size, config.norm_eps, bias=config.norm_bias)),
        (HeadlessConfigMixin, LinearModelMixin),
        title="Rwkv7",
        published=Published(values, renamed=renamed, moved=apart),
        places=dict.fromkeys(("linear_attention", "conv"), Place("rwkv7", ("mixer",))),
    ),
)
