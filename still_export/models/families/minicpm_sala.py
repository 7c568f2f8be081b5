"""MiniCPM-SALA: Lightning attention in most layers, softmax over chosen blocks in the others.

The published folder has its own code, which is not run. Here are configuration, modules with the weights, family.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from still_export.errors import ConfigError
from still_export.mixers.block_attention.settings import checked_choice
from still_export.mixers.config import LayersConfig
from still_export.models.families.linear_mixins import LinearConfigMixin, LinearModelMixin, Place
from still_export.models.families.softmax_families import Published, make_family
from still_export.models.families.stack import Stack, StackConfig, StackForCausalLM, copied, demand_covered

LINEAR, SPARSE = "linear_attention", "indexed_attention"
"""Names of layers that transformers accepts in a configuration."""
_TYPES = {"minicpm4": SPARSE, **dict.fromkeys(("lightning", "lightning_attn", "lightning-attn"), LINEAR)}
SCALES = {"1/sqrt(d)": -0.5, "1/d": -1.0}
"""Exponents e, by published name: Lightning layers scale their output by (channels of a head)^e."""


@strict
class SalaConfig(StackConfig):
    """Settings of its layers, with transformers' names where it has them; others are the published ones.

    Args:
        lightning_scale: Scale of the output of Lightning layers.
        sparse_config: Attributes of SelectBlocks.
        embed_scale, residual_scale, logits_scale: Factors of embeddings, of residual branches, and of the last hidden states.
    """

    vocab_size: int = 73448
    hidden_size: int = 4096
    intermediate_size: int = 16384
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 2
    head_dim: int = 128
    lightning_heads: int = 32
    lightning_kv_heads: int = 32
    lightning_scale: float = 128**-0.5
    lightning_rope: bool = True
    attention_rope: bool = False
    attention_bias: bool = False
    qk_norm: bool = True
    output_norm: bool = True
    output_gate: bool = True
    attention_gate: bool = True
    sparse_config: dict[str, int] | None = None
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    hidden_act: str = "silu"
    mlp_bias: bool = False
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 524288
    rope_parameters: dict[str, Any] | None = None


def values(config: Mapping[str, Any]) -> dict[str, Any]:
    sparse, dim = config["sparse_config"], int(config["head_dim"])
    settings = {
        **config,
        "sparse_config.use_nope": sparse.get("use_nope", False),
        "lightning_scale": config["lightning_scale"],
        "lightning_head_dim": config.get("lightning_head_dim") or dim,
    }
    covered = {
        "hidden_act": ("silu",),
        "sparse_config.use_nope": (False,),
        "lightning_scale": tuple(SCALES),
        "lightning_head_dim": (dim,),
    }
    demand_covered("a minicpm_sala", settings, covered)
    for name in config["mixer_types"]:
        demand_covered("a minicpm_sala", {"mixer_types": name}, {"mixer_types": tuple(_TYPES)})
    layers, heads = int(config["num_hidden_layers"]), int(config["num_attention_heads"])
    lightning = int(config.get("lightning_nh") or heads)
    shared = int(config.get("lightning_nkv") or lightning)
    if lightning % shared:
        raise ConfigError(f"lightning_nh={lightning} in config.json is no multiple of lightning_nkv={shared}. Fix it.")
    rope = {
        "rope_type": "default",
        "rope_theta": float(config.get("rope_theta", 1e4)),
        **(config.get("rope_scaling") or {}),
    }
    return {
        **copied(config, "hidden_size", "intermediate_size", "rms_norm_eps", "max_position_embeddings"),
        **copied(config, "attention_bias", "qk_norm", "initializer_range"),
        "model_type": "minicpm_sala",
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": int(config.get("num_key_value_heads") or heads),
        "head_dim": dim,
        "lightning_heads": lightning,
        "lightning_kv_heads": shared,
        "lightning_scale": dim ** SCALES[config["lightning_scale"]],
        "lightning_rope": bool(config.get("lightning_use_rope", True)),
        "attention_rope": bool(config["attn_use_rope"]),
        "output_norm": bool(config["use_output_norm"]),
        "output_gate": bool(config["use_output_gate"]),
        "attention_gate": bool(config["attn_use_output_gate"]),
        "sparse_config": _choice(sparse),
        "embed_scale": float(config["scale_emb"]),
        "residual_scale": config["scale_depth"] / math.sqrt(layers),
        "logits_scale": config["dim_model_base"] / config["hidden_size"],
        "rope_parameters": rope,
        "layer_types": [_TYPES[name] for name in config["mixer_types"]],
    }


def _choice(sparse: Mapping[str, Any]) -> dict[str, int]:
    names = ("block_size", "kernel_size", "kernel_stride", "window_size", "topk", "init_blocks", "dense_len")
    block, kernel, stride, window, top, init, dense = (int(sparse[name]) for name in names)
    if block < 1 or window % block:
        raise ConfigError(
            f"sparse_config.window_size={window} in config.json must be a multiple of block_size={block}. Fix one of them."
        )
    choice = {
        "block_size": block,
        "mean_stride": stride,
        "mean_length": kernel,
        "top_blocks": top + window // block,  # the window's blocks come on top of those that are chosen
        "init_blocks": init,
        "local_blocks": window // block,
        "dense_length": dense,
    }
    return checked_choice(choice, "sparse_config in config.json")


class SalaSparseMixer(nn.Module):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx, self.use_rope = layer_idx, config.attention_rope
        hidden, heads = config.hidden_size, config.num_attention_heads * config.head_dim
        keys, bias = config.num_key_value_heads * config.head_dim, config.attention_bias
        self.q_proj = nn.Linear(hidden, heads, bias=bias)
        self.k_proj, self.v_proj = (nn.Linear(hidden, keys, bias=bias) for _ in range(2))
        self.o_proj = nn.Linear(heads, hidden, bias=bias)
        if config.attention_gate:
            self.o_gate = nn.Linear(hidden, heads, bias=bias)


class SalaLightningMixer(nn.Module):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx, self.heads, self.head_dim = layer_idx, config.lightning_heads, config.head_dim
        self.turned = config.lightning_rope
        hidden, size = config.hidden_size, config.lightning_heads * config.head_dim
        keys = config.lightning_kv_heads * config.head_dim
        self.q_proj, self.o_proj = nn.Linear(hidden, size, bias=False), nn.Linear(size, hidden, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(hidden, keys, bias=False) for _ in range(2))
        if config.qk_norm:
            self.q_norm, self.k_norm = (LlamaRMSNorm(config.head_dim, config.rms_norm_eps) for _ in range(2))
        if config.output_norm:
            self.o_norm = LlamaRMSNorm(size, config.rms_norm_eps)
        if config.output_gate:
            self.z_proj = nn.Linear(hidden, size, bias=False)


class SalaBlock(nn.Module):
    """A layer: norm, mixer, norm, feed-forward, with two scaled residual branches."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        kind = SalaSparseMixer if config.layer_types[index] == SPARSE else SalaLightningMixer
        self.self_attn: nn.Module = kind(config, index)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.scale = config.residual_scale

    def forward(self, hidden: Tensor, cache: Any, **kwargs: Any) -> Tensor:
        mixed = self.self_attn(self.input_layernorm(hidden), past_key_values=cache, **kwargs)
        hidden = hidden + self.scale * (mixed[0] if isinstance(mixed, tuple) else mixed)
        return hidden + self.scale * self.mlp(self.post_attention_layernorm(hidden))


class LightningConfigMixin(LinearConfigMixin):
    def lightning_sizes(self, index: int) -> tuple[int, int, int, float]:
        config: Any = self
        return config.lightning_heads, config.head_dim, config.head_dim, config.lightning_scale


class SalaConfigMixin(LightningConfigMixin):
    def block_choice(self) -> dict[str, int]:
        return dict(self.sparse_config or {})  # type: ignore[attr-defined]

    def check(self, still: LayersConfig) -> None:
        super().check(still)
        checked_choice(self.block_choice(), "sparse_config")


class SalaModelMixin(LinearModelMixin):
    """Builds the stack; logits are of scaled hidden states."""

    def stack(self, config: Any) -> Stack:
        norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        return Stack(config, SalaBlock, norm, LlamaRotaryEmbedding(config), config.embed_scale)

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden * self.config.logits_scale)


FAMILIES = (
    make_family(
        __name__,
        SalaConfig,
        StackForCausalLM,
        (SalaConfigMixin, SalaModelMixin),
        title="MiniCPMSala",
        name="minicpm_sala",
        linear=True,
        published=Published(values),
        places={LINEAR: Place("lightning_attention", ("self_attn",)), SPARSE: Place("block_attention", ("self_attn",))},
    ),
)
