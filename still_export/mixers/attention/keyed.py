"""Layers over other ops than still::Attention whose states are keys and values: the traced form of such an op, and its module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from still_export.mixers.attention.cache import AttentionLayer
from still_export.mixers.cache_layer import layer_of
from still_export.mixers.kept import rounded
from still_export.mixers.projections import ProjectedAttention, wants_gradients
from still_graphs.spec import AttributeValue, OpSpec
from still_kernels.attention.meaning import AttentionState
from still_kernels.attention.meaning import Inputs as AttentionInputs
from still_kernels.torch_ops import Given, call, register

Inputs = TypeVar("Inputs", bound=AttentionInputs)
Attend = Callable[[Inputs, AttentionState, bool], tuple[Tensor, AttentionState]]
"""Of inputs, state and whether to write into it: output [B, T, H, D] and the state after the call."""


def op_of_keys(spec: OpSpec, inputs_type: type[Inputs], compute: Attend[Inputs]) -> Attend[Inputs]:
    """Register an op of one output and the states `key` and `value`, whose inputs and attributes are fields of `inputs_type`.

    Returns:
        `compute` itself; where a program is traced one node of the op instead, which has no derivative.
    """

    def computed(given: Given, attributes: Mapping[str, AttributeValue], in_place: bool) -> dict[str, Tensor]:
        tensors: dict[str, Any] = {name: tensor for name, tensor in given.items() if tensor is not None}
        state = AttentionState(*(tensors.pop(f"past_{name}") for name in ("key", "value", "length")))
        tensors |= attributes
        output, present = compute(inputs_type(**tensors), state, in_place)
        return {"output": output, "present_key": present.key, "present_value": present.value}

    register(spec, computed)

    def run(inputs: Inputs, state: AttentionState, in_place: bool = False) -> tuple[Tensor, AttentionState]:
        if not torch.compiler.is_compiling():
            return compute(inputs, state, in_place and not wants_gradients(inputs.query))
        assert inputs.new_tokens is not None
        past = {f"past_{name}": getattr(state, name) for name in ("key", "value", "length")}
        attributes = {a.name: getattr(inputs, a.name) for a in spec.attributes}
        results = call(spec, {**vars(inputs), **past}, attributes)
        kept = {name: results[f"present_{name}"] for name in ("key", "value")}
        return results["output"], replace(state, **kept, length=state.length + inputs.new_tokens)

    return run


class Keyed(nn.Module):
    """A module around such an op, whatever its projections."""

    layer_idx: int
    cache: str | None = None
    """Type that keys and values are kept in; None: their own."""

    def layer(self, key: Tensor) -> AttentionLayer:
        """A cache layer for keys [B, T, HK, D]."""
        return AttentionLayer(key.shape[2], key.shape[3], self.cache)

    def attended(
        self, attend: Attend[Inputs], kind: type[Inputs], heads: tuple[Tensor, Tensor, Tensor], cache: Any, **more: Any
    ) -> Tensor:
        """What `attend` gives of `kind`, made of query, key, value and `more`; `cache` takes the keys and values in."""
        query, key, value = heads[0], *(rounded(x, self.cache) for x in heads[1:])
        layer = layer_of(cache, self.layer_idx, AttentionLayer, "keeps keys")
        if layer is None:
            batch, tokens = query.shape[:2]
            counts = torch.full((batch,), tokens, dtype=torch.int64, device=query.device)
            state = self.layer(key).empty(batch, tokens, query.dtype, query.device)
        else:
            state = layer.take(query.dtype, query.device)
            assert layer.new_tokens is not None
            counts = layer.new_tokens
        inputs = kind(query, key, value, counts, **more)
        output, kept = attend(inputs, state, layer is not None and layer.owned)
        if layer is not None:
            layer.store(kept)
        return output


class KeyedAttention(Keyed, ProjectedAttention):
    """The projections of a family's module around such an op."""
