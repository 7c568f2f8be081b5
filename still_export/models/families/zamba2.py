"""Zamba2: Mamba-2 in most layers; it and softmax, both in each layer, in the others, which share the weights of softmax and MLP.

Source: arXiv:2411.15242. A shared block reads hidden states and embeddings; each layer that uses it has adapters of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.models.zamba2.configuration_zamba2 import Zamba2Config
from transformers.models.zamba2.modeling_zamba2 import Zamba2MambaMixer, Zamba2RMSNorm, Zamba2RotaryEmbedding

from still_export.errors import CheckpointError, ConfigError, UnsupportedModelError
from still_export.mixers.config import LayersConfig
from still_export.models.base import first_names
from still_export.models.families.linear_mixins import LinearConfigMixin, LinearModelMixin, Place, stack_family
from still_export.models.families.softmax_families import Published
from still_export.models.families.stack import Stack
from still_export.models.read.weights import Weight, value_of

HYBRID = "hybrid"
_BLOCK = re.compile(r"model\.layers\.(\d{1,6})\.shared_transformer\.(.+)")
_ADAPTER = re.compile(
    r"(self_attn|feed_forward)\.(?:linear_)?(q|k|v|gate_up)(?:_proj)?_adapter_list\.(\d{1,6})\.([01])\."
)


class Adapted(nn.Module):
    """A shared linear layer, and a layer's own adapter of it."""

    def __init__(self, inputs: int, outputs: int, rank: int, bias: bool = False) -> None:
        super().__init__()
        self.shared = nn.Linear(inputs, outputs, bias)
        self.down, self.up = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(x) + self.up(self.down(x))


class SharedAttention(nn.Module):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx, dim = layer_idx, config.attention_head_dim
        self.scaling = (dim / 2) ** -0.5
        width, keys = config.attention_hidden_size, config.num_key_value_heads
        for name, heads in (("q", config.num_attention_heads), ("k", keys), ("v", keys)):
            adapted, size = config.use_shared_attention_adapter, heads * dim
            own = Adapted(width, size, config.adapter_rank) if adapted else nn.Linear(width, size, bias=False)
            setattr(self, f"{name}_proj", own)
        self.o_proj = nn.Linear(config.num_attention_heads * dim, config.hidden_size, bias=False)


class SharedMLP(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        width, inner, bias = config.hidden_size, config.intermediate_size, config.add_bias_linear
        self.gate_up_proj = Adapted(width, 2 * inner, config.adapter_rank, bias)
        self.down_proj = nn.Linear(inner, width, bias)
        self.act = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(self.act(gate) * up)


class Zamba2Layer(nn.Module):
    """Norm and Mamba-2, with a residual connection."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        self.input_layernorm = Zamba2RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mamba = Zamba2MambaMixer(config, index)

    def forward(self, hidden: Tensor, cache: Any, **kwargs: Any) -> Tensor:
        """Hidden states [B, T, channels]; `cache` is a StillCache or None."""
        return hidden + self.mamba(self.input_layernorm(hidden), cache)


class Zamba2HybridLayer(Zamba2Layer):
    """The same behind a shared block, whose output Mamba-2 reads."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__(config, index)
        self.block_norm = Zamba2RMSNorm(config.attention_hidden_size, config.rms_norm_eps)
        self.self_attn = SharedAttention(config, index)
        self.pre_ff_layernorm = Zamba2RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.feed_forward = SharedMLP(config)
        self.linear = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def share(self, first: Zamba2HybridLayer) -> None:
        """Use the block of the layer `first`, but not its adapters."""
        for name, module in first.named_modules():
            block, last = name.split(".")[0], name.split(".")[-1]
            shared = block in ("block_norm", "self_attn", "pre_ff_layernorm", "feed_forward")
            if shared and last not in ("down", "up") and next(module.children(), None) is None:
                self.set_submodule(name, module)

    def forward(
        self, hidden: Tensor, cache: Any, position_embeddings: Any = None, embedded: Any = None, **kwargs: Any
    ) -> Tensor:
        x = self.block_norm(torch.cat((hidden, embedded), dim=-1))
        x = self.self_attn(x, position_embeddings, past_key_values=cache)[0]
        x = self.linear(self.feed_forward(self.pre_ff_layernorm(x)))
        return hidden + self.mamba(self.input_layernorm(hidden + x), cache)


class Zamba2Stack(Stack):
    def __init__(self, config: Any) -> None:
        rotary = Zamba2RotaryEmbedding(config) if config.use_mem_rope else None
        super().__init__(
            config,
            lambda config, index: (Zamba2HybridLayer if config.layer_types[index] == HYBRID else Zamba2Layer)(
                config, index
            ),
            Zamba2RMSNorm(config.hidden_size, config.rms_norm_eps),
            rotary,
        )
        hybrid = [layer for layer in self.layers if isinstance(layer, Zamba2HybridLayer)]
        for first, layer in zip(hybrid, hybrid[config.num_mem_blocks :], strict=False):
            layer.share(first)

    def forward(self, input_ids: Any = None, inputs_embeds: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
        embedded = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        return super().forward(inputs_embeds=embedded, position_ids=position_ids, embedded=embedded, **kwargs)


class Zamba2ConfigMixin(LinearConfigMixin):
    position_embedding_type = property(lambda self: "rope" if self.use_mem_rope else None)

    def check(self, still: LayersConfig) -> None:
        super().check(still)
        if self.use_long_context:  # type: ignore[attr-defined]
            raise UnsupportedModelError(
                "use_long_context=true in config.json: the published code stretches positions then, transformers' class does not. "
                "Set it to false for contexts of up to 4,096 tokens."
            )


class Zamba2ModelMixin(LinearModelMixin):
    def swap_mixers(self) -> None:
        super().swap_mixers()
        shared = {name: first for name, first in first_names(self).items() if name != first}  # type: ignore[arg-type]
        self._tied_weights_keys: dict[str, str] = {**type(self)._tied_weights_keys, **shared}  # type: ignore[attr-defined,misc]
        self.all_tied_weights_keys.update(shared)  # type: ignore[attr-defined]  # written once, read into all


def values(config: Mapping[str, Any]) -> dict[str, Any]:
    kinds = config.get("layers_block_type") or config.get("layer_types") or Zamba2Config().layers_block_type
    blocks = config.get("num_mem_blocks", 1)
    if not isinstance(blocks, int) or blocks < 1:
        raise ConfigError(f"num_mem_blocks={blocks!r} in config.json; a model has at least one shared block. Fix it.")
    return {**{k: v for k, v in config.items() if k != "layer_types"}, "layers_block_type": list(kinds)}


def moved(tensors: dict[str, Weight], config: Mapping[str, Any]) -> dict[str, Weight]:
    """Give shared tensors to the first layer with their block, adapters to the layers that use them."""
    hybrid = [layer for layer, kind in enumerate(config["layers_block_type"]) if kind == HYBRID]
    uses = {str(use): layer for use, layer in enumerate(hybrid)}
    first = {str(layer): hybrid[use % config.get("num_mem_blocks", 1)] for use, layer in enumerate(hybrid)}
    adapted = ("q_proj", "k_proj", "v_proj") if config.get("use_shared_attention_adapter") else ()
    found: dict[str, Weight] = {}
    for name, tensor in tensors.items():
        new = name.replace(".mamba_decoder.", ".").replace("model.final_layernorm.", "model.norm.")
        if (block := _BLOCK.fullmatch(name)) and block[1] in first:
            rest = block[2].replace("input_layernorm.", "block_norm.")
            for own in (*adapted, "gate_up_proj"):
                rest = rest.replace(f".{own}.", f".{own}.shared.")
            new = f"model.layers.{first[block[1]]}.{rest}"
            if (adapter := _ADAPTER.match(rest)) and adapter[3] in uses:
                half = ("down", "up")[int(adapter[4])]
                new = f"model.layers.{uses[adapter[3]]}.{adapter[1]}.{adapter[2]}_proj.{half}.weight"
        if new in found and not torch.equal(value_of(found[new]), value_of(tensor)):
            raise CheckpointError(
                f"{name} is not the same in all layers that share it. The files are damaged or trained apart; fetch the model again."
            )
        found[new] = tensor
    return found


FAMILIES = (
    stack_family(
        __name__,
        Zamba2Config,
        Zamba2Stack,
        (Zamba2ConfigMixin, Zamba2ModelMixin),
        title="Zamba2",
        places={
            "linear_attention": Place("mamba2", ("mamba",)),
            HYBRID: Place("parallel_mamba2", ("mamba", "self_attn")),
        },
        published=Published(values, moved=moved),
    ),
)
