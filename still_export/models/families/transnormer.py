"""TransNormerLLM: Lightning attention in every layer.

The published folders have their own code, which is not run. Here are configuration, modules with the weights, family.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn

from still_export.errors import ConfigError
from still_export.models.families.linear_mixins import LinearConfigMixin, LinearModelMixin, Place, stack_family
from still_export.models.families.softmax_families import Published
from still_export.models.families.stack import Stack, StackConfig, copied, demand_covered

EPSILON = 1e-6
"""Epsilon of its norms; no configuration has it."""


@strict
class TransNormerConfig(StackConfig):
    """Settings of its layers, with transformers' names where it has them.

    Args:
        lightning_size: Channels of a head's values, and of queries and keys before positions.
        lrpe_layers: Whether each layer has positions.
        embed_scale: Factor of embeddings.
    """

    vocab_size: int = 64000
    hidden_size: int = 1024
    intermediate_size: int = 2816
    num_hidden_layers: int = 24
    num_attention_heads: int = 8
    num_key_value_heads: int = 8
    lightning_size: int = 128
    lrpe_layers: list[bool] | None = None
    embed_scale: float = 32.0
    bias: bool = False
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 0


def values(config: Mapping[str, Any]) -> dict[str, Any]:
    covered = {"norm_type": ("simplermsnorm",), "linear_act_fun": ("silu", "swish")}
    demand_covered("a transnormer", config, covered)
    width, layers, heads = (int(config[f"decoder_{x}"]) for x in ("embed_dim", "layers", "attention_heads"))
    inner, turned = int(config["hidden_dim"]), list(config["linear_use_lrpe_list"])
    if layers < 2:
        raise ConfigError(
            f"decoder_layers={layers} in config.json: the decay of a layer is divided by their number less one; there must be two or more."
        )
    if len(turned) != layers:
        raise ConfigError(
            f"linear_use_lrpe_list in config.json has {len(turned)} entries for decoder_layers={layers}. Fix one of them."
        )
    if inner % heads or (inner != width and any(turned)):
        raise ConfigError(
            f"hidden_dim={inner} in config.json must be a multiple of decoder_attention_heads={heads}, and with positions equal to "
            f"decoder_embed_dim={width}. Fix one of them."
        )
    return {
        **copied(config, "bias"),
        "model_type": "transnormer",
        "hidden_size": width,
        "intermediate_size": width if config["glu_dim"] == -1 else int(config["glu_dim"]),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "lightning_size": inner // heads,
        "lrpe_layers": [bool(x) for x in turned],
        "embed_scale": 1.0 if config.get("no_scale_embedding") else width**0.5,
        "layer_types": ["linear_attention"] * layers,
    }


class PlainRMSNorm(nn.Module):
    """RMSNorm without weight over the last axis, in at least float32."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.to(torch.promote_types(x.dtype, torch.float32))
        return (rows * torch.rsqrt((rows * rows).mean(-1, keepdim=True) + EPSILON)).to(x.dtype)


class Angles(nn.Module):
    """`theta` [H, 1, D]: rotation of a channel per token."""

    def __init__(self, heads: int, dim: int) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(heads, 1, dim))


class Places(nn.Module):
    """Positions of tokens [B, T] as numbers [B, T, 1]: every layer has its own angles."""

    def __init__(self, config: Any) -> None:
        super().__init__()

    def forward(self, hidden: Tensor, position_ids: Tensor) -> Tensor:
        return position_ids[..., None].to(torch.promote_types(hidden.dtype, torch.float32))


class TransNormerMixer(nn.Module):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx, self.layers, self.heads = layer_idx, config.num_hidden_layers, config.num_attention_heads
        inner = self.heads * config.lightning_size
        self.qkvu_proj = nn.Linear(config.hidden_size, 4 * inner, bias=config.bias)
        self.out_proj = nn.Linear(inner, config.hidden_size, bias=config.bias)
        self.norm = PlainRMSNorm()
        if config.lrpe_layers[layer_idx]:
            self.lrpe = Angles(self.heads, config.lightning_size)


class GatedUnit(nn.Module):
    """A gated feed-forward layer without an activation."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.l1, self.l2 = (nn.Linear(config.hidden_size, config.intermediate_size, bias=config.bias) for _ in range(2))
        self.l3 = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.l3(self.l1(x) * self.l2(x))


class TransNormerBlock(nn.Module):
    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        self.token_norm, self.channel_norm = PlainRMSNorm(), PlainRMSNorm()
        self.token_mixer = TransNormerMixer(config, index)
        self.channel_mixer = GatedUnit(config)

    def forward(self, hidden: Tensor, cache: Any, **kwargs: Any) -> Tensor:
        hidden = hidden + self.token_mixer(self.token_norm(hidden), cache, **kwargs)
        return hidden + self.channel_mixer(self.channel_norm(hidden))


class TransNormerConfigMixin(LinearConfigMixin):
    def lightning_sizes(self, index: int) -> tuple[int, int, int, float]:
        config: Any = self
        size: int = config.lightning_size
        return config.num_attention_heads, size * (2 if config.lrpe_layers[index] else 1), size, 1.0


FAMILIES = (
    stack_family(
        __name__,
        TransNormerConfig,
        lambda config: Stack(config, TransNormerBlock, PlainRMSNorm(), Places(config), config.embed_scale),
        (TransNormerConfigMixin, LinearModelMixin),
        title="TransNormer",
        published=Published(values),
        places={"linear_attention": Place("lightning_attention", ("token_mixer",))},
    ),
)
