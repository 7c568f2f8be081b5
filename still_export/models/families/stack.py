"""A language model of sequential layers, for families without a class in transformers, or without one that accepts a StillCache.

Modules of families have weights under the names in the files; a mixer replaces the module that mixes tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from still_export.errors import UnsupportedModelError
from still_export.mixers.cache_layer import CACHE

COMMON = (
    *("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings", "use_cache"),
    *("dtype", "torch_dtype"),
)
"""Fields of a config.json that have transformers' names in all such families."""


def copied(config: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """The fields of a config.json that are in COMMON or `names`."""
    return {name: config[name] for name in (*COMMON, *names) if name in config}


def demand_covered(model: str, config: Mapping[str, Any], covered: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise UnsupportedModelError for the first value in config.json that is not `covered`; `model`: for the message ("an rwkv7")."""
    for name, values in covered.items():
        if name in config and config[name] not in values:
            raise UnsupportedModelError(
                f"{name}={config[name]!r} in config.json of {model} model; covered: {' or '.join(map(repr, values))}."
            )


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """rope_parameters of a config.json, which may have rope_theta and rope_scaling instead."""
    scaling = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    if "type" in scaling:
        scaling["rope_type"] = scaling.pop("type")
    return {"rope_type": "default", "rope_theta": float(config.get("rope_theta", 1e4)), **scaling}


@strict
class StackConfig(PreTrainedConfig):
    """Common settings of such models, with transformers' names."""

    layer_types: list[str] | None = None
    max_position_embeddings: int = 1 << 20
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2


class LlamaBlock(nn.Module):
    """A Llama layer: norm, `mixer`, norm, feed-forward, with two residual connections."""

    def __init__(self, config: Any, mixer: nn.Module) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (
            LlamaRMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(2)
        )
        self.attn = mixer
        self.mlp = LlamaMLP(config)

    def forward(self, hidden: Tensor, cache: Any, **kwargs: Any) -> Tensor:
        """Hidden states [B, T, channels]; `cache` is a StillCache or None."""
        hidden = hidden + self.attn(self.input_layernorm(hidden), cache, **kwargs)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Stack(nn.Module):
    """Embedding, layers, norm. Every layer maps (hidden, cache, **shared arguments) to hidden.

    Args:
        layer: Makes a layer; arguments: configuration, layer number.
        norm: The norm after the last layer.
        rotary: Computes the layers' `position_embeddings` from hidden states and positions; None: no positions.
        scale: Factor of embeddings.
    """

    def __init__(
        self,
        config: Any,
        layer: Callable[[Any, int], nn.Module],
        norm: nn.Module,
        rotary: nn.Module | None = None,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        layers = [layer(config, index) for index in range(config.num_hidden_layers)]
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        self.rotary_emb, self.scale = rotary, scale

    def forward(
        self,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Normalized hidden states [B, T, channels] for token ids or embeddings."""
        cache = kwargs.pop(CACHE, None)
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if inputs_embeds is None and self.scale != 1.0:
            hidden = hidden * self.scale
        if self.rotary_emb is not None:
            kwargs["position_embeddings"] = self.rotary_emb(hidden, position_ids)
        for layer in self.layers:
            hidden = layer(hidden, cache, **kwargs)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden), **{CACHE: cache})


class StackForCausalLM(PreTrainedModel, GenerationMixin):
    """A `Stack`, made by `stack`, with a head, as a model of transformers."""

    base_model_prefix = "model"
    _is_stateful = True
    _tied_weights_keys: ClassVar[dict[str, str]] = {  # type: ignore[misc]
        "lm_head.weight": "model.embed_tokens.weight"
    }

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = self.stack(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def stack(self, config: Any) -> Stack:
        """The layers of a model with the configuration `config`."""
        raise NotImplementedError
