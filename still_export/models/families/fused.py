"""Split fused linear layers of checkpoints (query, key and value; gate and up projection) into the model's layers."""

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
from still_export.models.read.weights import Deferred, Weight, Weights, value_of

_FUSED = re.compile(r"(model\.layers\.\d{1,6}\.)(self_attn\.qkv|mlp\.gate_up)_proj\.weight")
_PART = re.compile(r"(model\.layers\.\d{1,6}\.)(?:self_attn\.([qkv])|mlp\.(gate|up))_proj")


def whole_pair(module: str, b: Weight, tensors: Weights) -> tuple[str, Weight] | None:
    """Extend the LoRA factor `b` [N, r] of `module` to the fused layer in `tensors`, with zeros for other outputs.

    Returns:
        (the fused weight's name, the factor); None: there is no fused layer, or its number of outputs does not fit.
    """
    found = _PART.fullmatch(module)
    if found is None or b.dim() != 2:
        return None
    name = f"{found[1]}{'self_attn.qkv' if found[2] else 'mlp.gate_up'}_proj.weight"
    if name not in tensors:
        return None
    outputs, rows, part = tensors[name].shape[0], b.shape[0], found[2] or found[3]
    rest = outputs - rows  # of the other parts: keys and values have as many each, gate and up too
    fits = {"q": rest > 0 and rest % 2 == 0, "gate": rest == rows, "up": rest == rows}.get(part, rest > rows)
    if not fits:
        return None
    begin = {"q": 0, "k": rest - rows, "v": rest, "gate": 0, "up": rest}[part]
    shape = torch.Size((outputs, b.shape[1]))
    return name, Deferred(shape, b.dtype, partial(_padded, b, begin, outputs))


def split_linear_layers(tensors: Weights, config: Any, expected: Collection[str]) -> dict[str, Weight]:
    """`tensors` with fused layers split, except those among the model's parameters `expected`.

    Raises:
        CheckpointError: A fused layer's number of outputs is not the sum of its parts'.
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
            result[f"{found[1]}{part}_proj.weight"] = Deferred(
                shape, tensor.dtype, partial(rows_of, tensor, begin, end)
            )
    return result


def rows_of(tensor: Weight, begin: int, end: int) -> Tensor:
    return value_of(tensor)[begin:end].clone()


def _padded(tensor: Weight, begin: int, outputs: int) -> Tensor:
    rows = value_of(tensor)
    return torch.nn.functional.pad(rows, (0, 0, begin, outputs - begin - len(rows)))
