"""Mamba-in-Llama: a Llama or Mistral whose attention was made Mamba or Mamba-2 in some layers. Weights, families.

Source: The Mamba in the Llama, arXiv:2408.15237. Folders have the base's config.json and mamba_config.json, or one file with the fields of
both, as Qwerky writes them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from still_export.folders.families import IN_LLAMA
from still_export.mixers.layers import FULL
from still_export.models.families.linear_mixins import LinearModelMixin, Place, stack_family
from still_export.models.families.mamba_in_llama_config import InLlamaConfig, InLlamaConfigMixin, values
from still_export.models.families.softmax_families import Published
from still_export.models.families.stack import Stack
from still_export.models.read.weights import Deferred, Weight, value_of

LINEAR = "linear_attention"
_EPSILON = 1e-5
"""Of Mamba-2's norm of a head, whatever the model's others are."""


def moved(tensors: dict[str, Weight], config: Mapping[str, Any]) -> dict[str, Weight]:
    """With projections taken apart that code for inference, and Qwerky, keep as one."""
    inner, shared = config["mamba_inner"], config["mamba_shared"]
    heads, keys = (config[f"num_{name}_heads"] * config["head_dim"] for name in ("attention", "key_value"))
    whole = {
        "mha.in_proj.weight": {
            f"self_attn.{n}_proj.weight": size for n, size in (("q", heads), ("k", keys), ("v", keys))
        }
    }
    if config["model_type"].endswith("mamba"):
        sizes = {
            "in_proj_z": inner,
            "in_proj_x": shared,
            "B_proj": shared,
            "C_proj": inner,
            "dt_proj_down": config["mamba_dt_rank"],
        }
        whole["mamba.in_proj.weight"] = {f"mamba.{name}.weight": size for name, size in sizes.items()}
    found: dict[str, Weight] = {}
    for name, tensor in tensors.items():
        own = next((own for own in whole if name.endswith(f".{own}")), None)
        if own is None or tensor.shape[0] != sum(whole[own].values()):
            found[name.replace(".mha.out_proj.", ".self_attn.o_proj.")] = tensor
            continue
        start = 0
        for part, size in whole[own].items():
            read = partial(_rows, tensor, start, size)
            found[name.removesuffix(own) + part] = Deferred(torch.Size((size, *tensor.shape[1:])), tensor.dtype, read)
            start += size
    return found


def _rows(whole: Weight, start: int, count: int) -> Tensor:
    return value_of(whole)[start : start + count]


class InLlamaWeights(nn.Module):
    """What layers of both kinds have; `mixed` channels go through the convolution."""

    activation = "silu"

    def __init__(self, config: Any, layer_idx: int, mixed: int, steps: int) -> None:
        super().__init__()
        self.layer_idx, self.repeat_first = layer_idx, config.mamba_repeat_first
        self.ssm_state_size = dim = config.mamba_d_state
        self.heads, self.shared = config.mamba_inner // dim, config.mamba_shared // dim
        taps = config.mamba_d_conv
        self.conv1d = nn.Conv1d(mixed, mixed, taps, groups=mixed, padding=taps - 1, bias=config.mamba_conv_bias)
        self.D = nn.Parameter(torch.ones(steps))
        self.out_proj = nn.Linear(config.mamba_inner, config.hidden_size, bias=False)


class InLlamaMamba(InLlamaWeights):
    """The weights of a layer of Mamba; a mixer of ours takes its place."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        inner, shared, width = config.mamba_inner, config.mamba_shared, config.hidden_size
        super().__init__(config, layer_idx, inner if config.mamba_repeat_first else shared, inner)
        self.time_step_rank = config.mamba_dt_rank
        self.in_proj_x, self.B_proj = (nn.Linear(width, shared, bias=False) for _ in range(2))
        self.in_proj_z, self.C_proj = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.dt_proj_down = nn.Linear(width, self.time_step_rank, bias=False)
        self.dt_proj = nn.Linear(self.time_step_rank, inner)
        self.A_log = nn.Parameter(torch.zeros(inner, self.ssm_state_size))


class InLlamaMamba2(InLlamaWeights):
    """The same of Mamba-2."""

    time_step_limit = (0.0, math.inf)

    def __init__(self, config: Any, layer_idx: int) -> None:
        inner, shared, dim = config.mamba_inner, config.mamba_shared, config.mamba_d_state
        steps = inner // dim
        super().__init__(config, layer_idx, 3 * inner if config.mamba_repeat_first else inner + 2 * shared, steps)
        self.num_heads = self.n_groups = steps
        self.head_dim = dim
        self.in_proj = nn.Linear(config.hidden_size, 2 * (inner + shared) + steps, bias=False)
        self.dt_bias, self.A_log = (nn.Parameter(torch.zeros(steps)) for _ in range(2))
        self.norm = LlamaRMSNorm(inner, _EPSILON)


class InLlamaBlock(nn.Module):
    """A Llama's layer with Mamba in the place of its attention, or with its `attention` as `place`."""

    attention: type[nn.Module] = LlamaAttention
    place = "self_attn"

    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        self.linear = config.layer_types[index] == LINEAR
        if self.linear:
            self.mamba: nn.Module = (InLlamaMamba2 if config.second else InLlamaMamba)(config, index)
        else:
            self.add_module(self.place, self.attention(config, index))
        self.mlp = LlamaMLP(config)
        self.input_layernorm, self.post_attention_layernorm = (
            LlamaRMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(2)
        )

    def forward(self, hidden: Tensor, cache: Any, **kwargs: Any) -> Tensor:
        normed = self.input_layernorm(hidden)
        if self.linear:
            mixed = self.mamba(normed, cache)
        else:
            mixed, _ = getattr(self, self.place)(normed, past_key_values=cache, **kwargs)
        hidden = hidden + mixed
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


def in_llama_stack(config: Any, block: type[nn.Module] = InLlamaBlock) -> Stack:
    norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
    return Stack(config, block, norm, LlamaRotaryEmbedding(config) if FULL in config.layer_types else None)


FAMILIES = tuple(
    stack_family(
        __name__,
        InLlamaConfig,
        in_llama_stack,
        (InLlamaConfigMixin, LinearModelMixin),
        title=f"InLlama{mixer.removeprefix('mamba')}",
        name=name,
        published=Published(values, moved=moved),
        places={LINEAR: Place(mixer, ("mamba",)), FULL: Place(FULL, ("self_attn",))},
    )
    for name, mixer in zip(IN_LLAMA, ("mamba", "mamba2"), strict=True)
)
