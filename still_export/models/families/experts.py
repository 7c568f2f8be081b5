"""Convert experts of checkpoints, single or concatenated tensors, to the model's stacks, whose rows alternate between gate and up."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from still_export.errors import CheckpointError
from still_export.models.read.blocks import BlockWeight, joined
from still_export.models.read.weights import Deferred, SourceBlocks, Weight, Weights, narrow_value_of, value_of

_PARTS = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}
_ONE = re.compile(rf"(.*\.experts)\.(\d{{1,6}})\.({'|'.join(_PARTS)})\.weight")
_ALL = re.compile(r"(.*\.experts)\.(gate_up_proj|up_proj|down_proj)")
STACKED = (".experts.gate_up", ".experts.down")
"""Suffixes of the names of stacks."""
_NAMES = (
    (".block_sparse_moe.input_linear.weight", ".block_sparse_moe.experts.gate_up_proj"),
    (".block_sparse_moe.output_linear.weight", ".block_sparse_moe.experts.down_proj"),
    (".block_sparse_moe.router.layer.weight", ".block_sparse_moe.gate.weight"),
    (".block_sparse_moe.router.weight", ".block_sparse_moe.gate.weight"),
    (".feed_forward.router.weight", ".feed_forward.gate.weight"),
    (".feed_forward.expert_bias", ".feed_forward.gate.e_score_correction_bias"),
)
"""Parts of names in Granite, Jamba and LFM2, and in the model."""
FLOAT32 = ("e_score_correction_bias", "expert_bias", ".lrpe.theta")
"""Suffixes of tensors that stay float32 in a model of any type, because rounding them would change decisions."""


def stacked_experts(tensors: Weights) -> dict[str, Weight]:
    """`tensors` with the experts of each layer as `experts.gate_up` [E, R, I] and `experts.down` [E, I, M], which are read one expert
    at a time.

    Raises:
        CheckpointError: An expert is missing, or its parts do not fit the others'.
    """
    result: dict[str, Weight] = {}
    found: dict[str, dict[str, dict[int, Weight]]] = {}
    for name, tensor in tensors.items():
        for published, here in _NAMES:
            name = name.replace(published, here)
        if one := _ONE.fullmatch(name):
            found.setdefault(one[1], {}).setdefault(_PARTS[one[3]], {})[int(one[2])] = tensor
        elif (whole := _ALL.fullmatch(name)) and tensor.dim() == 3:
            turns = whole[2] == "gate_up_proj" and tensor.shape[1] % 2 == 0
            value = _with_turns(tensor) if turns else tensor
            result[f"{whole[1]}.{'down' if whole[2] == 'down_proj' else 'gate_up'}"] = value
        else:
            result[name] = tensor
    for module, parts in found.items():
        first = {"gate", "up"} & parts.keys()
        lacks = sorted({"up", "down"} - parts.keys())
        counts = range(1 + max(number for each in parts.values() for number in each))
        lacks += [f"{part} of expert {n}" for part, each in parts.items() for n in counts if n not in each]
        if lacks:
            raise CheckpointError(
                f"{module} has no {', '.join(lacks[:4])}. The files are incomplete; fetch the model again."
            )
        for name, own in (("gate_up", [parts[p] for p in ("gate", "up") if p in first]), ("down", [parts["down"]])):
            result[f"{module}.{name}"] = _stacked(f"{module}.{name}", own, len(counts))
    return result


def single_experts(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The inverse for gated experts: views, one for each matrix of an expert, with published names."""
    for name, tensor in tensors:
        if not name.endswith(STACKED):
            yield name, tensor
            continue
        module, _, part = name.rpartition(".")
        parts = {"down": tensor} if part == "down" else {"gate": tensor[:, ::2], "up": tensor[:, 1::2]}
        for which, stack in parts.items():
            for number, matrix in enumerate(stack):
                yield f"{module}.{number}.{which}_proj.weight", matrix


def _with_turns(weight: Weight) -> Weight:
    """Rows of concatenated gate and up projections, interleaved lazily."""
    if isinstance(weight, Tensor):
        return Deferred(weight.shape, weight.dtype, lambda: _in_turns(weight))
    narrow, part = weight.narrow, weight.part
    return replace(
        weight,
        read=lambda: _in_turns(weight.read()),
        narrow=None if narrow is None else lambda: _in_turns(narrow()),
        part=None if part is None else lambda number: _in_turns(part(number)[None])[0],
    )


def _in_turns(concatenated: Tensor) -> Tensor:
    """Rows [E, 2 M, I] of gate and up projection, interleaved; in `concatenated` all gate rows come first."""
    return concatenated.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


def _stacked(name: str, parts: Sequence[Mapping[int, Weight]], count: int) -> Deferred:
    """A stack of experts with one matrix or two; rows of two are interleaved."""
    one = parts[0][0]
    for each in parts:
        for number, weight in each.items():
            if weight.shape != one.shape or weight.dtype != one.dtype or weight.dim() != 2:
                raise CheckpointError(
                    f"{name}: expert {number} has {list(weight.shape)}, expert 0 {list(one.shape)}. The files belong to different models. "
                    "Fetch the model again."
                )
    shape = torch.Size((count, len(parts) * one.shape[0], one.shape[1]))
    read, part = partial(_read, parts, shape, one.dtype), partial(_part, parts)
    bits = max(weight.bits if isinstance(weight, Deferred) else 0 for each in parts for weight in each.values())
    return Deferred(shape, one.dtype, read, _stacked_blocks(parts), bits, part=part)


def _stacked_blocks(parts: Sequence[Mapping[int, Weight]]) -> SourceBlocks | None:
    """Blocks of each expert; None: they are of different kinds."""
    blocks = [weight.blocks if isinstance(weight, Deferred) else None for each in parts for weight in each.values()]
    kinds = {None if b is None or b.order is not None else replace(b, read=_of_expert) for b in blocks}
    kind = kinds.pop()
    return None if kinds or kind is None or kind.offsets else replace(kind, read=partial(_of_expert, parts))


def _of_expert(parts: Sequence[Mapping[int, Weight]], number: int) -> BlockWeight:
    rows = parts[0][number].shape[0]
    blocks = (weight.blocks.read() for each in parts if isinstance(weight := each[number], Deferred) and weight.blocks)
    return joined(blocks, len(parts) * rows).rows(np.arange(len(parts) * rows).reshape(len(parts), rows).T.ravel())


def _read(parts: Sequence[Mapping[int, Weight]], shape: torch.Size, dtype: torch.dtype) -> Tensor:
    whole = torch.empty(shape, dtype=dtype)
    for place, each in enumerate(parts):
        for number, weight in each.items():
            whole[number, place :: len(parts)] = value_of(weight)
    return whole


def _part(parts: Sequence[Mapping[int, Weight]], number: int) -> Tensor:
    return torch.stack([narrow_value_of(each[number]) for each in parts], dim=1).flatten(0, 1)
