"""Multi-token prediction (MTP) heads of published checkpoints, as small models of their families.

A head normalizes two vectors: the model's last hidden state (after its norm) and the embedding of the next token. A linear layer combines
them. Layers of the family, with a cache of their own, a norm and the model's output head predict the token after that one. For further
guesses the head's own normalized output replaces the model's hidden state.

Source: how vLLM reads them (model_executor/models/qwen3_5_mtp.py, qwen3_next_mtp.py, nemotron_h_mtp.py, bailing_moe_mtp.py) and
transformers (modeling_layers.py, MtpModel).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from still_export.mixers.roles import FEED_FORWARD
from still_export.models.families.softmax_families import Family
from still_export.models.read.weights import Weight, Weights

PREFIX = "mtp."
"""Prefix of a head's own weights and nodes."""
SHARED = ("model.embed_tokens.weight", "lm_head.weight")
"""Weights that a head shares with the model."""
_PARTS = {
    **dict.fromkeys(("fc", "eh_proj"), "fc"),
    **dict.fromkeys(("pre_fc_norm_embedding", "enorm"), "embedding_norm"),
    **dict.fromkeys(("pre_fc_norm_hidden", "hnorm"), "hidden_norm"),
    "final_layernorm": "model.norm",
}
"""Parts around a head's layers, by their published names."""
_NAME = re.compile(r"(?:.*\b)?mtp\.(.*)|model\.(layers\.(\d{1,6})\..*)")
_PART = re.compile(rf"(?:layers\.\d+\.)?({'|'.join(_PARTS)})\.(.*)")
_AGAIN = re.compile(r"(?:layers\.\d+\.)?(?:shared_head\.|embed_tokens\.|word_embeddings\.|lm_head\.)")
"""Names under which heads repeat the model's embedding and output head."""


def weight_name(name: str, head: bool = True) -> str:
    """Name of a model's weight in the joint graph; prefixed for a `head`."""
    return f"{PREFIX}{name}" if head and name not in SHARED else name


class AheadMixin:
    """Mixed into a family's STILL class, whose layers are the head's."""

    config: Any
    model: Any
    weight_roles: ClassVar = {"fc.weight": FEED_FORWARD}

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        self.embedding_norm, self.hidden_norm = (copy.deepcopy(self.model.norm) for _ in range(2))
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)

    def decode(self, positions: Tensor, cache: Any, *, input_ids: Tensor, hidden: Tensor, **kwargs: Any) -> Any:
        """Like StillModelMixin. `hidden` [B, T, channels]: for each token, the model's hidden vector of the one before."""
        tokens = self.embedding_norm(self.model.embed_tokens(input_ids))
        embeds = self.fc(torch.cat([tokens, self.hidden_norm(hidden.to(tokens.dtype))], dim=-1))
        return super().decode(positions, cache, inputs_embeds=embeds, **kwargs)  # type: ignore[misc]


@cache
def ahead_family(family: Family) -> Family:
    """The family of heads for `family`."""
    name = f"{family.still_model.__name__}Ahead"
    return replace(family, still_model=type(name, (AheadMixin, family.still_model), {"__module__": __name__}))


def ahead_config(config: Any, values: Mapping[str, Any]) -> dict[str, Any] | None:
    """config.json of the head alone; None: no head, or one that is not covered."""
    kind = config.model_type.removeprefix("still_")
    layers = {"layer_types": ["full_attention"], "num_hidden_layers": 1}
    if kind in ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"):
        if values.get("mtp_num_hidden_layers", 1) != 1 or values.get("mtp_use_dedicated_embeddings"):
            return None
        return {**values, **layers, "mlp_only_layers": []}
    if kind == "bailing_hybrid" and config.num_mtp_layers == 1:
        return {**values, **layers, "mlp_layer_types": ["sparse"], "first_k_dense_replace": 0}
    if kind == "nemotron_h" and config.num_nextn_predict_layers == 1:
        types = list(config.mtp_layers_block_type)
        if "linear_attention" in types:  # its state would depend on the model's states
            return None
        dropped = ("hybrid_override_pattern", "mtp_hybrid_override_pattern", "layers_block_type")
        remaining = {name: value for name, value in values.items() if name not in dropped}
        return {**remaining, "layer_types": types, "num_hidden_layers": len(types), "num_nextn_predict_layers": 0}
    return None


def ahead_tensors(tensors: Weights) -> dict[str, Weight]:
    """A head's own tensors under the names of its model; `tensors` are as published, or numbered after the model's layers."""
    found: dict[str, Weight] = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        assert match is not None, name
        rest = match[1] if match[1] is not None else f"layers.0.{match[2].split('.', 2)[2]}"
        if _AGAIN.match(rest):
            continue
        part = _PART.fullmatch(rest)
        found[f"{_PARTS[part[1]]}.{part[2]}" if part else f"model.{rest}"] = tensor
    return found
