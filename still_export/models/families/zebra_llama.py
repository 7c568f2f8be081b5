"""Zebra-Llama: a Llama with Mamba-2 in some layers, and attention to latents in the others.

Source: Zebra-Llama, arXiv:2505.17272. Its sizes are in hybrid_config.json, next to the base's config.json. Mamba-2 is as in Mamba-in-Llama.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from still_export.folders.families import ZEBRA
from still_export.mixers.layers import FULL
from still_export.models.families.linear_mixins import LinearModelMixin, Place, stack_family
from still_export.models.families.mamba_in_llama import (
    LINEAR,
    InLlamaBlock,
    InLlamaConfig,
    InLlamaConfigMixin,
    in_llama_stack,
)
from still_export.models.families.mamba_in_llama import values as in_llama_values
from still_export.models.families.softmax_families import Published
from still_export.models.families.stack import demand_covered
from still_export.models.read.weights import Deferred, Weight, value_of

_SIZES = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")


@strict
class ZebraConfig(InLlamaConfig):
    """Settings of its layers; sizes of latent attention have transformers' names.

    Args:
        latent_norm: Latents of queries and keys are normalized.
    """

    kv_lora_rank: int = 128
    q_lora_rank: int | None = 1344
    qk_rope_head_dim: int = 32
    qk_nope_head_dim: int = 32
    v_head_dim: int = 64
    latent_norm: bool = False


def values(config: Mapping[str, Any]) -> dict[str, Any]:
    scaling = config.get("rope_scaling") or {}
    settings = {"rope_scaling": scaling.get("rope_type", scaling.get("type", "yarn")), **scaling}
    covered = {
        "rope_scaling": ("yarn", "linear"),
        "mscale": (1, None),
        "mscale_all_dim": (0, None),
        "attention_factor": (None,),
    }
    demand_covered("a zebra_llama", settings, covered)
    rank, heads = config.get("q_lora_rank"), int(config["num_attention_heads"])
    return {
        **in_llama_values(config),
        **{name: int(config[name]) for name in _SIZES},
        **({"num_key_value_heads": heads} if config.get("use_full_kv_head") else {}),
        "q_lora_rank": None if rank is None else int(rank),
        "latent_norm": bool(config.get("use_lora_layer_norm", False)),
        "head_dim": int(config["qk_rope_head_dim"]),  # channels with positions
    }


def moved(tensors: dict[str, Weight], config: Mapping[str, Any]) -> dict[str, Weight]:
    """Repeat projections of latents to keys and values for every head, if the file has them for groups of heads."""
    found: dict[str, Weight] = {}
    size, heads = config["qk_nope_head_dim"] + config["v_head_dim"], config["num_attention_heads"]
    for name, whole in tensors.items():
        name = name.replace(".mla.out_proj.", ".mla.o_proj.")
        if name.endswith(".mla.kv_b_proj.weight") and whole.shape[0] == config["num_key_value_heads"] * size:
            shape = torch.Size((heads * size, *whole.shape[1:]))
            whole = Deferred(shape, whole.dtype, partial(_of_every_head, whole, size, heads))
        found[name] = whole
    return found


def _of_every_head(whole: Weight, size: int, heads: int) -> Tensor:
    parts = value_of(whole).unflatten(0, (-1, size))
    return parts.repeat_interleave(heads // parts.shape[0], dim=0).flatten(0, 1)


class ZebraAttention(nn.Module):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.kv_lora_rank, self.qk_rope_head_dim = config.kv_lora_rank, config.qk_rope_head_dim
        self.qk_nope_head_dim, self.v_head_dim = config.qk_nope_head_dim, config.v_head_dim
        own = self.qk_nope_head_dim + self.qk_rope_head_dim
        self.scaling = own**-0.5
        width, heads, rank = config.hidden_size, config.num_attention_heads, config.q_lora_rank
        if rank is None:
            self.q_proj = nn.Linear(width, heads * own, bias=False)
        else:
            self.q_a_proj, self.q_b_proj = nn.Linear(width, rank, bias=False), nn.Linear(rank, heads * own, bias=False)
            self.q_a_layernorm = LlamaRMSNorm(rank) if config.latent_norm else nn.Identity()
        self.kv_a_proj_with_mqa = nn.Linear(width, self.kv_lora_rank + self.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = LlamaRMSNorm(self.kv_lora_rank) if config.latent_norm else nn.Identity()
        self.kv_b_proj = nn.Linear(self.kv_lora_rank, heads * (self.qk_nope_head_dim + self.v_head_dim), bias=False)
        self.o_proj = nn.Linear(heads * self.v_head_dim, width, bias=False)


class ZebraBlock(InLlamaBlock):
    attention, place = ZebraAttention, "mla"


FAMILIES = (
    stack_family(
        __name__,
        ZebraConfig,
        partial(in_llama_stack, block=ZebraBlock),
        (InLlamaConfigMixin, LinearModelMixin),
        title="ZebraLlama",
        name=ZEBRA,
        published=Published(values, moved=moved),
        places={LINEAR: Place("mamba2", ("mamba",)), FULL: Place("latent_attention", ("mla",))},
    ),
)
