"""Routing Transformer in a language model: a causal reading in Llama's layers. No folder is published; the format is this project's.

Left out is what depends on the whole sequence (clusters choose their nearest tokens, so a token may be in several), heads of local
attention, keys and values without a token, and positions of values.
"""

from __future__ import annotations

from typing import Any

from huggingface_hub.dataclasses import strict
from torch import nn, zeros
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from still_export.errors import ConfigError
from still_export.mixers.config import LayersConfig
from still_export.models.families.linear_mixins import LinearConfigMixin, LinearModelMixin, Place, stack_family
from still_export.models.families.stack import LlamaBlock, Stack, StackConfig


@strict
class RoutingConfig(StackConfig):
    """The layers' settings, under transformers' names where there are any.

    Args:
        window_size: Tokens of the same cluster that a token attends to.
    """

    vocab_size: int = 32000
    hidden_size: int = 1024
    intermediate_size: int = 2816
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_key_value_heads: int = 16
    num_clusters: int = 32
    window_size: int = 256
    mlp_bias: bool = False
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    rope_parameters: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self.layer_types = ["full_attention"] * self.num_hidden_layers
        self.num_key_value_heads = self.num_attention_heads
        super().__post_init__(**kwargs)


class RoutingMixer(nn.Module):
    """The weights of a layer under their stored names, until one of our mixers replaces the module."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        heads, width = config.num_attention_heads, config.hidden_size
        self.layer_idx, self.head_dim = layer_idx, width // heads
        self.q_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.means = nn.Parameter(zeros(heads, config.num_clusters, self.head_dim))


def _layer(config: Any, index: int) -> LlamaBlock:
    return LlamaBlock(config, RoutingMixer(config, index))


class RoutingConfigMixin(LinearConfigMixin):
    """Checks of the settings."""

    def check(self, still: LayersConfig) -> None:
        config: Any = self
        if config.hidden_size % config.num_attention_heads:
            raise ConfigError(
                f"hidden_size={config.hidden_size} in config.json is no multiple of num_attention_heads={config.num_attention_heads}. "
                "Fix it."
            )
        super().check(still)
        if config.num_clusters < 2 or config.window_size < 1:
            raise ConfigError(
                f"num_clusters={config.num_clusters} and window_size={config.window_size} in config.json; they must be at least 2 and 1. "
                "Fix them."
            )


FAMILIES = (
    stack_family(
        __name__,
        RoutingConfig,
        lambda config: Stack(
            config, _layer, LlamaRMSNorm(config.hidden_size, config.rms_norm_eps), LlamaRotaryEmbedding(config)
        ),
        (RoutingConfigMixin, LinearModelMixin),
        title="RoutingTransformer",
        name="routing_transformer",
        places={"full_attention": Place("cluster_attention", ("attn",))},
    ),
)
