"""Qwen2.5 and Qwen3 whose softmax RADLADS made RWKV-6 or RWKV-7, in all layers or some: modules that hold the weights, families."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from still_export.mixers.layers import FULL
from still_export.models.families.linear_mixins import Place, stack_family
from still_export.models.families.radlads_config import LINEAR, NAMES, SHARES, RadladsConfig, moved, unused, values
from still_export.models.families.rwkv7 import low_rank
from still_export.models.families.softmax_families import Published
from still_export.models.families.stack import Stack

_EPSILON = 1e-5
"""Of the norm of a head, for each of its channels."""


class QwenProjections(nn.Module):
    """A layer's projections, and the norms of queries and keys where the model has them."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx, self.dim = layer_idx, config.head_dim
        self.groups = config.num_attention_heads // config.num_key_value_heads
        width, heads = config.hidden_size, config.num_attention_heads * self.dim
        bias, keys = config.attention_bias, config.num_key_value_heads * self.dim
        self.q_proj = nn.Linear(width, heads, bias=bias)
        self.k_proj, self.v_proj = (nn.Linear(width, keys, bias=bias) for _ in range(2))
        self.o_proj = nn.Linear(heads, width, bias=config.output_bias)
        if config.qk_norm:
            self.q_norm, self.k_norm = (LlamaRMSNorm(self.dim, config.rms_norm_eps) for _ in range(2))


class RuleWeights(QwenProjections):
    """What layers of both rules have beside: decay, gate and norm of the output."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.balanced = config.balanced
        width, heads = config.hidden_size, config.num_attention_heads * self.dim
        decay, _, _, gate, _ = config.ranks
        self.w0 = nn.Parameter(torch.zeros(1, 1, heads))
        self.w_lora = low_rank(width, decay, nn.Tanh(), bias=False, wide=heads)
        if config.gate == "full":
            self.gate = nn.Linear(width, heads, bias=False)
        elif config.gate == "low_rank":
            self.g_lora = low_rank(width, gate, nn.Sigmoid(), bias=False, wide=heads)
        if config.head_norm:
            self.ln_x = nn.GroupNorm(config.num_attention_heads, heads, eps=self.dim * _EPSILON)

    def vectors(self, size: int, names: Iterable[str]) -> None:
        """Parameters of `size` numbers, which lie as [1, 1, size]."""
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.zeros(1, 1, size)))


class Rwkv6Attention(RuleWeights):
    """The weights of a layer of RWKV-6; a mixer of ours takes its place."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        width, shift = config.hidden_size, config.ranks[-1]
        if config.token_shift:
            self.mix_in = nn.Linear(width, len(SHARES) * shift, bias=False)
            self.vectors(width, ["x_all", *(f"x_{name}" for name in SHARES)])
            for name in SHARES:
                self.add_module(f"mix_{name}", nn.Linear(shift, width, bias=False))


class Rwkv7Attention(RuleWeights):
    """The same of RWKV-7."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        width, heads = config.hidden_size, config.num_attention_heads * self.dim
        _, rate, share, _, _ = config.ranks
        self.vectors(heads, ["a0", *(["k_k", "k_a"] if config.key_scales else [])])
        self.a_lora = low_rank(width, rate, nn.Identity(), bias=False, wide=heads)
        if layer_idx:
            self.vectors(heads, ["v0"])
            self.v_lora = low_rank(width, share, nn.Identity(), bias=False, wide=heads)
        if config.token_shift:
            self.vectors(width, [f"x_{name}" for name in "rwkvag"])
        if config.bonus:
            self.r_k = nn.Parameter(torch.zeros(config.num_attention_heads, self.dim))


class RadladsBlock(nn.Module):
    """A Qwen's layer. Behind hidden states go the first layer's values, which RWKV-7 reads in all others."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        self.width = config.hidden_size
        linear = Rwkv7Attention if config.seven else Rwkv6Attention
        self.self_attn: nn.Module = (linear if config.layer_types[index] == LINEAR else QwenProjections)(config, index)
        self.mlp = LlamaMLP(config)
        self.input_layernorm, self.post_attention_layernorm = (
            LlamaRMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(2)
        )

    def forward(self, hidden: Tensor, cache: Any, **kwargs: Any) -> Tensor:
        """[B, T, channels], of RWKV-7 but in the first layer with the values, to the same with them; `cache` is a StillCache or None."""
        hidden, first = hidden[..., : self.width], hidden[..., self.width :]
        mixed, value = self.self_attn(self.input_layernorm(hidden), past_key_values=cache, first=first, **kwargs)
        first = first if first.shape[-1] or value is None else value
        hidden = hidden + mixed
        hidden = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return torch.cat((hidden, first), dim=-1) if first.shape[-1] else hidden


class LastRMSNorm(LlamaRMSNorm):
    """Of the hidden states alone."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        normed: Tensor = super().forward(hidden_states[..., : self.weight.shape[0]])
        return normed


def _stack(config: Any) -> Stack:
    norm = LastRMSNorm(config.hidden_size, config.rms_norm_eps)
    return Stack(config, RadladsBlock, norm, LlamaRotaryEmbedding(config) if config.use_rope else None)


FAMILIES = tuple(
    stack_family(
        __name__,
        RadladsConfig,
        _stack,
        title=name.title(),
        published=Published(values, moved=moved, unused=unused),
        places={LINEAR: Place("radlads", ("self_attn",)), FULL: Place(FULL, ("self_attn",))},
    )
    for name in NAMES
)
