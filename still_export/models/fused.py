"""Linear layers that checkpoints hold as one, of query, key and value or of gate and up projection, as the model has them: apart."""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from still_export.errors import CheckpointError
from still_export.mixers.layers import head_size
from still_export.models.weights import Deferred, Weight, Weights, value_of

_FUSED = re.compile(r"(model\.layers\.\d{1,6}\.)(self_attn\.qkv|mlp\.gate_up)_proj\.weight")


def split_linear_layers(tensors: Weights, config: Any, expected: Collection[str]) -> dict[str, Weight]:
    """`tensors` with such layers apart, but for those that the model, whose parameters are `expected`, has as one itself.

    Raises:
        CheckpointError: A layer has another number of outputs than its parts together.
    """
    result: dict[str, Weight] = {}
    for name, tensor in tensors.items():
        if name in expected or not (found := _FUSED.fullmatch(name)):
            result[name] = tensor
            continue
        if found[2] == "mlp.gate_up":
            parts = {f"mlp.{part}": config.intermediate_size for part in ("gate", "up")}
        else:
            heads = dict(zip("qkv", (config.num_attention_heads, *[config.num_key_value_heads] * 2), strict=True))
            parts = {f"self_attn.{part}": count * head_size(config) for part, count in heads.items()}
        ends = list(accumulate(parts.values(), initial=0))
        if tensor.shape[0] != ends[-1]:
            raise CheckpointError(
                f"tensor {name} has {tensor.shape[0]} outputs, config.json demands {ends[-1]}. The configuration and the weights belong to "
                "different models."
            )
        for part, (begin, end) in zip(parts, pairwise(ends), strict=True):
            shape = torch.Size((end - begin, *tensor.shape[1:]))
            result[f"{found[1]}{part}_proj.weight"] = Deferred(shape, tensor.dtype, partial(_rows, tensor, begin, end))
    return result


def _rows(tensor: Weight, begin: int, end: int) -> Tensor:
    return value_of(tensor)[begin:end].clone()
