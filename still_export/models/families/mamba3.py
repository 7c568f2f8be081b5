"""Mamba-3 in every layer, as in flash-linear-attention: configuration, modules with the weights, family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from still_export.errors import ConfigError, UnsupportedModelError
from still_export.models.families.linear_mixins import HeadlessConfigMixin, MambaModelMixin, Place, stack_family
from still_export.models.families.softmax_families import Published
from still_export.models.families.stack import Stack, StackConfig, copied


@strict
class Mamba3Config(StackConfig):
    """Settings of its layers, with transformers' names where it has them.

    Args:
        groups: Number of groups of heads that share B and C.
        angles: Number of angles that rotate pairs of a state's channels.
        least_rate: Least decay rate of a head.
        output_norm: Heads are normalized before the gate.
    """

    vocab_size: int = 32000
    hidden_size: int = 2048
    num_hidden_layers: int = 48
    num_attention_heads: int = 64
    num_key_value_heads: int = 64
    head_dim: int = 64
    state_size: int = 128
    groups: int = 1
    angles: int = 32
    least_rate: float = 1e-4
    output_norm: bool = False
    use_bias: bool = False
    norm_eps: float = 1e-5
    pad_token_id: int | None = 0


def values(config: Mapping[str, Any]) -> dict[str, Any]:
    if config.get("is_mimo"):
        raise UnsupportedModelError(
            "is_mimo=True in config.json of a mamba3 model; covered: False, states of one input and output."
        )
    width, dim, size = int(config["hidden_size"]), int(config.get("state_size", 128)), int(config.get("head_dim", 64))
    inner, groups = int(config.get("expand", 2) * width), int(config.get("n_groups", 1))
    turned = int(dim * config.get("rope_fraction", 0.5))
    if inner % size or (inner // size) % groups or turned < 2:
        raise ConfigError(
            f"config.json gives {inner} channels of heads of head_dim={size} in n_groups={groups}, and turns {turned} of "
            f"state_size={dim} channels. Fix expand, head_dim, n_groups or rope_fraction."
        )
    return {
        **copied(config, "num_hidden_layers", "use_bias", "norm_eps", "initializer_range"),
        "model_type": "mamba3",
        "hidden_size": width,
        "num_attention_heads": inner // size,
        "num_key_value_heads": inner // size,
        "head_dim": size,
        "state_size": dim,
        "groups": groups,
        "angles": turned // 2,
        "least_rate": float(config.get("A_floor", 1e-4)),
        "output_norm": bool(config.get("is_outproj_norm", False)),
        "layer_types": ["linear_attention"] * int(config.get("num_hidden_layers", 48)),
    }


class Mamba3Weights(nn.Module):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx, self.least, self.normed = layer_idx, config.least_rate, config.output_norm
        heads, size, groups, dim = config.num_attention_heads, config.head_dim, config.groups, config.state_size
        self.sizes = (heads, size, groups, dim, config.angles)
        inner, width = heads * size, config.hidden_size
        channels = 2 * inner + 2 * groups * dim + 3 * heads + config.angles
        self.in_proj = nn.Linear(width, channels, bias=config.use_bias)
        self.dt_bias, self.D = (nn.Parameter(torch.zeros(heads)) for _ in range(2))
        self.B_bias, self.C_bias = (nn.Parameter(torch.zeros(heads, 1, dim)) for _ in range(2))
        self.B_norm, self.C_norm = (LlamaRMSNorm(dim, config.norm_eps) for _ in range(2))
        if self.normed:
            self.norm = LlamaRMSNorm(inner, config.norm_eps)
        self.out_proj = nn.Linear(inner, width, bias=config.use_bias)


class Mamba3Block(nn.Module):
    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        self.norm = LlamaRMSNorm(config.hidden_size, config.norm_eps)
        self.mixer: nn.Module = Mamba3Weights(config, index)

    def forward(self, hidden: Tensor, cache: Any, **kwargs: Any) -> Tensor:
        return hidden + self.mixer(self.norm(hidden), cache)


FAMILIES = (
    stack_family(
        __name__,
        Mamba3Config,
        lambda config: Stack(config, Mamba3Block, LlamaRMSNorm(config.hidden_size, config.norm_eps)),
        (HeadlessConfigMixin, MambaModelMixin),
        title="Mamba3",
        published=Published(values),
        places={"linear_attention": Place("mamba3", ("mixer",))},
    ),
)
