"""The traced form of attention to chosen blocks: the torch op `still::block_attention`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from still_graphs.spec import AttributeValue
from still_kernels.attention.meaning import AttentionState
from still_kernels.block_attention.call import block_attention as kernel
from still_kernels.block_attention.meaning import Inputs
from still_kernels.block_attention.spec import BLOCK_ATTENTION
from still_kernels.torch_ops import Given, call, register

_ACTIVATIONS = ("query", "key", "value", "blocks", "new_tokens")


def _compute(given: Given, attributes: Mapping[str, AttributeValue], in_place: bool) -> dict[str, Tensor]:
    tensors = {name: tensor for name, tensor in given.items() if tensor is not None}
    inputs = Inputs(**{name: tensors[name] for name in _ACTIVATIONS}, block_size=int(attributes["block_size"]))
    state = AttentionState(tensors["past_key"], tensors["past_value"], tensors["past_length"])
    output, present = kernel(inputs, state, in_place)
    return {"output": output, "present_key": present.key, "present_value": present.value}


register(BLOCK_ATTENTION, _compute)


def block_attention(inputs: Inputs, state: AttentionState) -> tuple[Tensor, AttentionState]:
    """Call `torch.ops.still.block_attention`, traceable as one node: output [B, T, H, D] and the state after the call."""
    assert inputs.new_tokens is not None
    given = {name: getattr(inputs, name) for name in _ACTIVATIONS}
    past = {"past_key": state.key, "past_value": state.value, "past_length": state.length}
    results = call(BLOCK_ATTENTION, {**given, **past}, {"block_size": inputs.block_size})
    kept = {name: results[f"present_{name}"] for name in ("key", "value")}
    return results["output"], replace(state, **kept, length=state.length + inputs.new_tokens)


def read_blocks(inputs: Inputs, state: AttentionState, owned: bool) -> tuple[Tensor, AttentionState]:
    """The same, one node where a program is traced; into `state` where it is `owned`."""
    if torch.compiler.is_compiling():
        return block_attention(inputs, state)
    return kernel(inputs, state, owned and not inputs.wants_gradients())
