"""Mamba-in-Llama: a Llama or Mistral with Mamba or Mamba-2 in some layers, softmax in the others. Weights, families.

Source: The Mamba in the Llama, arXiv:2408.15237. Folders have the base's config.json and mamba_config.json, or one file with the fields of
both, as Qwerky writes them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from still_export.errors import ConfigError, UnsupportedModelError
from still_export.folders.families import IN_LLAMA
from still_export.mixers.layers import FULL
from still_export.models.families.linear_mixins import LinearConfigMixin, LinearModelMixin, Place, stack_family
from still_export.models.families.softmax_families import Published
from still_export.models.families.stack import Stack, StackConfig, copied, demand_covered, rope_of
from still_export.models.read.weights import Deferred, Weight, value_of

LINEAR = "linear_attention"
_READ = ("expand", "ngroups", "d_state", "d_conv", "dt_rank", "repeat_kv_before_conv", "conv_bias")
_TRAINING = (
    *("A_init_range", "conv_init", "dt_min", "dt_max", "dt_init", "dt_scale", "dt_init_floor", "headdim"),
    *("chunk_size", "use_mem_eff_path", "use_fast_path"),
)
"""Fields of ssm_cfg without effect on a trained model."""
_COVERED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        ("bias", "proj_x_bias", "proj_z_bias", "out_proj_bias", "norm_before_gate", "D_has_hdim"), (False,)
    ),
    **{"rmsnorm": (True,), "d_ssm": (None,)},
}


@strict
class InLlamaConfig(StackConfig):
    """Settings of its layers, with transformers' names where it has them.

    Args:
        mamba_inner: Channels of a Mamba layer's gate, C and output.
        mamba_shared: Channels of x and B, each used by mamba_inner / mamba_shared groups of mamba_d_state channels.
        mamba_repeat_first: x and B are repeated before the convolution, else after it.
        mamba_dt_rank: Rank of the step; Mamba only.
    """

    vocab_size: int = 128256
    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    mamba_inner: int = 4096
    mamba_shared: int = 1024
    mamba_d_state: int = 128
    mamba_d_conv: int = 4
    mamba_dt_rank: int = 256
    mamba_repeat_first: bool = False
    mamba_conv_bias: bool = True
    hidden_act: str = "silu"
    attention_bias: bool = False
    attention_dropout: float = 0.0
    mlp_bias: bool = False
    rms_norm_eps: float = 1e-5
    rope_parameters: dict[str, Any] | None = None


def values(config: Mapping[str, Any]) -> dict[str, Any]:
    kind, width, ssm = str(config["model_type"]), int(config["hidden_size"]), dict(config.get("ssm_cfg") or {})
    second, heads, layers = (
        not kind.endswith("mamba"),
        int(config["num_attention_heads"]),
        int(config["num_hidden_layers"]),
    )
    kinds = list(config["layer_types"])
    model = f"a {kind}"
    unread = sorted(set(ssm) - {*_READ, *_TRAINING, *_COVERED})
    if unread:
        raise UnsupportedModelError(f"ssm_cfg of {model} model has {', '.join(unread)}; read: {', '.join(_READ)}.")
    demand_covered(model, ssm, _COVERED)
    no = (False, None)
    covered = {
        "hidden_act": ("silu",),
        "attention_bias": no,
        "mlp_bias": no,
        "d_model": (width, None),
        "n_layer": (layers, None),
    }
    context = int(config.get("max_position_embeddings") or 1 << 20)
    window = config.get("sliding_window")
    if FULL in kinds and (window or context) < context:
        raise UnsupportedModelError(
            f"sliding_window={window} in config.json of {model} model: softmax layers are read without a window, as the published code "
            "runs them. Set it to null to read them so."
        )
    demand_covered(model, config, covered)
    dim = int(ssm.get("d_state") or (128 if second else 16))
    keys, size = int(config.get("num_key_value_heads") or heads), int(config.get("head_dim") or width // heads)
    inner, shared = int(config.get("d_inner") or width * ssm.get("expand", 2)), int(config.get("d_xb") or keys * size)
    groups = ssm.get("ngroups", 1) if second else inner // dim
    if shared % dim or inner % shared or inner != groups * dim:
        raise ConfigError(
            f"the configuration gives d_inner={inner}, d_xb={shared}, and in ssm_cfg d_state={dim}"
            f"{f', ngroups={groups}' if second else ''}: d_inner must be a multiple of d_xb, and d_xb of d_state"
            f"{', and d_inner ngroups times d_state' if second else ''}. Fix the named values."
        )
    rank = ssm.get("dt_rank", "auto")
    return {
        **copied(config, "intermediate_size", "rms_norm_eps", "initializer_range"),
        **(copied(config, "max_position_embeddings") if FULL in kinds else {}),
        "model_type": kind,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "head_dim": size,
        "mamba_inner": inner,
        "mamba_shared": shared,
        "mamba_d_state": dim,
        "mamba_d_conv": int(ssm.get("d_conv", 4)),
        "mamba_dt_rank": math.ceil(width / 16) if rank == "auto" else int(rank),
        "mamba_repeat_first": bool(ssm.get("repeat_kv_before_conv", not second)),
        "mamba_conv_bias": bool(ssm.get("conv_bias", True)),
        "rope_parameters": rope_of(config),
        "layer_types": kinds,
    }


class InLlamaConfigMixin(LinearConfigMixin):
    """Sizes under the names that Mamba-2's mixer reads."""

    @property
    def second(self) -> bool:
        return not self.model_type.endswith("mamba")  # type: ignore[attr-defined]

    @property
    def mamba_mixed(self) -> int:
        """Channels that go through Mamba's convolution."""
        return self.mamba_inner if self.mamba_repeat_first else self.mamba_shared  # type: ignore[attr-defined]

    @property
    def mamba_n_heads(self) -> int:
        return self.mamba_inner // self.mamba_d_state  # type: ignore[attr-defined]

    @property
    def mamba_n_groups(self) -> int:
        """Number of groups of B and C in the convolution's input."""
        return self.mamba_n_heads if self.mamba_repeat_first else self.mamba_shared // self.mamba_d_state  # type: ignore[attr-defined]

    @property
    def mamba_d_head(self) -> int:
        return self.mamba_d_state  # type: ignore[attr-defined]


_EPSILON = 1e-5
"""Epsilon of Mamba-2's norm of a head; other norms use the configuration's."""


def moved(tensors: dict[str, Weight], config: Mapping[str, Any]) -> dict[str, Weight]:
    """Split the projections that inference code and Qwerky fuse."""
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
    """Weights of both kinds of layers; `mixed` channels go through the convolution."""

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
    """A Llama layer with Mamba instead of attention, or with its attention under the name `place`."""

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
