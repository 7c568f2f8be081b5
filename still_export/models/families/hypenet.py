"""HypeNet: a Qwen3 with Lightning attention in some layers, and softmax attention without positions in the others.

Source: Hybrid Linear Attention Done Right, arXiv:2601.22156.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from still_export.errors import ConfigError
from still_export.mixers.layers import FULL
from still_export.models.families.linear_mixins import LinearModelMixin, Place, stack_family
from still_export.models.families.minicpm_sala import LINEAR, SCALES, LightningConfigMixin, SalaLightningMixer
from still_export.models.families.softmax_families import Published
from still_export.models.families.stack import Stack, StackConfig, copied, demand_covered, rope_of

_TYPES = {"attn": FULL, **dict.fromkeys(("lightning-attn", "lightning_attn"), LINEAR)}
_ORIGIN = 362.0
"""Default origin of attn_logits_scaling."""


@strict
class HypeConfig(StackConfig):
    """Settings of its layers, with transformers' names where it has them.

    Args:
        lightning_scale: Scale of the output of Lightning layers.
        qk_norm, output_norm, output_gate: In Lightning layers.
        attention_gate, attention_rope: In softmax layers.
        query_scale: Scale of queries in softmax layers.
        query_origin: Queries in softmax layers are also scaled by log(position + query_origin) / log(query_origin); None: they are not.
    """

    vocab_size: int = 151936
    hidden_size: int = 4096
    intermediate_size: int = 22016
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 32
    head_dim: int = 128
    lightning_heads: int = 32
    lightning_kv_heads: int = 32
    lightning_scale: float = 128**-0.5
    lightning_rope: bool = True
    qk_norm: bool = False
    output_norm: bool = False
    output_gate: bool = False
    attention_gate: bool = False
    attention_rope: bool = True
    query_scale: float = 1.0
    query_origin: float | None = None
    hidden_act: str = "silu"
    mlp_bias: bool = False
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 32768
    rope_parameters: dict[str, Any] | None = None


def values(config: Mapping[str, Any]) -> dict[str, Any]:
    layers, heads = int(config["num_hidden_layers"]), int(config["num_attention_heads"])
    keys = int(config.get("num_key_value_heads") or heads)
    dim = int(config.get("head_dim") or config["hidden_size"] // heads)
    no = (False, None)
    covered = {
        "hidden_act": ("silu",),
        **dict.fromkeys(("attention_bias", "lightning_use_short_conv", "use_sliding_window"), no),
        "lightning_head_dim": (dim, None),
    }
    demand_covered("a hypenet", config, covered)
    names = config.get("mixer_types") or ["attn"] * layers
    for name in names:
        demand_covered("a hypenet", {"mixer_types": name}, {"mixer_types": tuple(_TYPES)})
    lightning, shared = int(config.get("lightning_nh") or heads), int(config.get("lightning_nkv") or keys)
    if lightning % shared:
        raise ConfigError(f"lightning_nh={lightning} in config.json is no multiple of lightning_nkv={shared}. Fix it.")
    scaling, factor, origin = config.get("attn_logits_scaling"), 1.0, None
    if isinstance(scaling, str):
        origin = float(scaling.split()[1]) if len(scaling.split()) > 1 else _ORIGIN
    elif scaling is not None:
        factor = float(scaling)
    if origin is not None and not 2 <= origin < 1 << 31:
        raise ConfigError(
            f"attn_logits_scaling={scaling!r} in config.json: the number in it must be at least 2. Fix it."
        )
    return {
        **copied(
            config, "hidden_size", "intermediate_size", "rms_norm_eps", "max_position_embeddings", "initializer_range"
        ),
        "model_type": "hypenet",
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "head_dim": dim,
        "lightning_heads": lightning,
        "lightning_kv_heads": shared,
        "lightning_scale": dim ** SCALES.get(config.get("lightning_scale", "1/sqrt(d)"), 0.0),
        "lightning_rope": bool(config.get("lightning_use_rope", True)),
        "qk_norm": bool(config.get("lightning_use_qk_norm", False)),
        "output_norm": bool(config.get("lightning_use_output_norm", False)),
        "output_gate": bool(config.get("lightning_use_output_gate", False)),
        "attention_gate": bool(config.get("attn_use_output_gate", False)),
        "attention_rope": bool(config.get("attn_use_rope", True)),
        "query_scale": factor,
        "query_origin": origin,
        "rope_parameters": rope_of(config),
        "layer_types": [_TYPES[name] for name in names],
    }


class HypeAttention(nn.Module):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx, self.use_rope, self.factor = layer_idx, config.attention_rope, config.query_scale
        width, heads = config.hidden_size, config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj, self.o_proj = nn.Linear(width, heads, bias=False), nn.Linear(heads, width, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(width, keys, bias=False) for _ in range(2))
        self.q_norm, self.k_norm = (LlamaRMSNorm(config.head_dim, config.rms_norm_eps) for _ in range(2))
        if config.attention_gate:
            self.o_gate = nn.Linear(width, heads, bias=False)


class HypePositions(LlamaRotaryEmbedding):
    """Returns cosines, sines and, with `query_origin`, the scale of softmax layers' queries [B, T, 1]."""

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, ...]:
        turn: tuple[Tensor, ...] = super().forward(x, position_ids)
        origin = self.config.query_origin
        if origin is None:
            return turn
        return *turn, (position_ids[..., None].float() + origin).log() / math.log(int(origin))


class HypeBlock(nn.Module):
    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        self.linear = config.layer_types[index] == LINEAR
        self.self_attn: nn.Module = (SalaLightningMixer if self.linear else HypeAttention)(config, index)
        self.mlp = LlamaMLP(config)
        self.input_layernorm, self.post_attention_layernorm = (
            LlamaRMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(2)
        )

    def forward(self, hidden: Tensor, cache: Any, position_embeddings: tuple[Tensor, ...], **kwargs: Any) -> Tensor:
        turn = position_embeddings[:2] if self.linear else position_embeddings
        normed = self.input_layernorm(hidden)
        mixed = self.self_attn(normed, past_key_values=cache, position_embeddings=turn, **kwargs)
        hidden = hidden + (mixed if self.linear else mixed[0])
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


FAMILIES = (
    stack_family(
        __name__,
        HypeConfig,
        lambda config: Stack(
            config, HypeBlock, LlamaRMSNorm(config.hidden_size, config.rms_norm_eps), HypePositions(config)
        ),
        (LightningConfigMixin, LinearModelMixin),
        title="HypeNet",
        published=Published(values),
        places={LINEAR: Place("lightning_attention", ("self_attn",)), FULL: Place(FULL, ("self_attn",))},
    ),
)
