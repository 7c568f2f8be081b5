"""RAT: configuration, modules with the weights, family. Its published code writes no folder; config.json has this project's format, with
the names of that code's settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from huggingface_hub.dataclasses import strict
from torch import Tensor, nn, zeros
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from still_export.errors import ConfigError
from still_export.mixers.layers import MOST_ROWS
from still_export.models.families.linear_mixins import Place, stack_family
from still_export.models.families.softmax_families import Published
from still_export.models.families.stack import Stack, StackConfig, copied, demand_covered
from still_export.models.families.support import SLIDING

NAMES = (
    ("embedding.wte.", "model.embed_tokens."),
    ("backbone.layers.", "model.layers."),
    ("backbone.ln.", "model.norm."),
    ("head.lm_head.", "lm_head."),
)


@strict
class RatConfig(StackConfig):
    """The layers' settings, under transformers' names where there are any.

    Args:
        row_tokens: Tokens of a chunk.
        groups: Groups of heads; the heads of a group share queries and keys.
        sliding_window: Tokens that local attention sees, including the current one.
    """

    vocab_size: int = 32000
    hidden_size: int = 2048
    intermediate_size: int = 8192
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_key_value_heads: int = 16
    head_dim: int = 128
    row_tokens: int = 16
    groups: int = 2
    sliding_window: int | None = None
    rms_norm_eps: float = 1e-6
    rope_parameters: dict[str, Any] | None = None


def values(config: Mapping[str, Any]) -> dict[str, Any]:
    covered = {"ln": ("rmsnorm",), "act_fn": ("gelu",), "bias": (False,)}
    demand_covered("a rat", config, covered)
    width, layers, dim = (int(config[name]) for name in ("d_model", "num_layers", "d_head"))
    groups, chunk = int(config.get("ngroups", 2)), int(config.get("chunk_size", 16))
    if width % dim or (width // dim) % groups:
        raise ConfigError(
            f"d_model={width} in config.json must be a multiple of d_head={dim}, and their quotient of ngroups={groups}. Fix one of them."
        )
    step, window = int(config.get("interleave_step") or 1), int(config.get("window_size", 1024))
    if step < 1 or not 1 <= window < MOST_ROWS:
        raise ConfigError(
            f"interleave_step={step} and window_size={window} in config.json; they must be at least 1, and the latter less than "
            f"{MOST_ROWS}. Fix them."
        )
    return {
        **copied(config),
        "model_type": "rat",
        "hidden_size": width,
        "intermediate_size": int(config.get("d_ffn") or 4 * width),
        "num_hidden_layers": layers,
        "num_attention_heads": width // dim,
        "num_key_value_heads": width // dim,
        "head_dim": dim,
        "row_tokens": chunk,
        "groups": groups,
        "rope_parameters": {"rope_type": "default", "rope_theta": float(config.get("base", 1e4))},
        "layer_types": ["full_attention" if i % step == 0 else SLIDING for i in range(layers)],
        "sliding_window": window + 1,
    }


class RatMixer(nn.Module):
    """The weights of a layer under their stored names, until one of our mixers replaces the module."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx, self.heads, self.head_dim, self.groups = (
            layer_idx,
            config.num_attention_heads,
            config.head_dim,
            config.groups,
        )
        width = config.hidden_size
        self.in_proj = nn.Linear(width, 3 * width + 2 * self.groups * self.head_dim, bias=False)
        self.gate_bias = nn.Parameter(zeros(width))
        self.input_norm = LlamaRMSNorm(width, config.rms_norm_eps)
        self.out_proj = nn.Linear(width, width, bias=False)


class RatLocal(nn.Module):
    """The same for a layer of local attention."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        width = config.hidden_size
        self.in_proj = nn.Linear(width, 3 * width, bias=False)
        self.input_norm = LlamaRMSNorm(width, config.rms_norm_eps)
        self.out_proj = nn.Linear(width, width, bias=False)


class RatFeedForward(nn.Module):
    """Norm and two linear layers with a residual."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.ln = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.fc2(nn.functional.gelu(self.fc1(self.ln(hidden))))


class RatBlock(nn.Module):
    """A layer: norm and mixer with a residual, then the feed-forward."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        kind = RatLocal if config.layer_types[index] == SLIDING else RatMixer
        self.seq_layer: nn.Module = kind(config, index)
        self.hidden_layer = RatFeedForward(config)

    def forward(self, hidden: Tensor, cache: Any, **kwargs: Any) -> Tensor:
        mixed, _ = self.seq_layer(self.seq_layer.input_norm(hidden), past_key_values=cache, **kwargs)  # type: ignore[operator]
        return self.hidden_layer(hidden + mixed)


class ChunkPositions(LlamaRotaryEmbedding):
    """Returns cosines and sines of the tokens' chunks, [B, T, D] each; whether a token is the first of its chunk, [B, T, 1]; and, with
    layers of local attention, cosines and sines of the tokens."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.row_tokens, self.local = config.row_tokens, SLIDING in config.layer_types

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        cos, sin = super().forward(x, position_ids // self.row_tokens)
        own = super().forward(x, position_ids) if self.local else ()
        return cos, sin, (position_ids % self.row_tokens == 0)[..., None], *own


FAMILIES = (
    stack_family(
        __name__,
        RatConfig,
        lambda config: Stack(
            config, RatBlock, LlamaRMSNorm(config.hidden_size, config.rms_norm_eps), ChunkPositions(config)
        ),
        title="Rat",
        published=Published(values, NAMES),
        places={
            "full_attention": Place("strided_attention", ("seq_layer",)),
            SLIDING: Place("rat_window", ("seq_layer",)),
        },
    ),
)
