"""The traced form of softmax attention: the torch op `still::attention`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from still_graphs.spec import CACHE, AttributeValue
from still_kernels.attention.call import attention as kernel
from still_kernels.attention.meaning import AttentionState, Inputs
from still_kernels.attention.spec import ATTENTION
from still_kernels.torch_ops import Given, call, register


def _compute(given: Given, attributes: Mapping[str, AttributeValue], in_place: bool) -> dict[str, Tensor]:
    tensors = {name: tensor for name, tensor in given.items() if tensor is not None}
    inputs = Inputs(*(tensors[name] for name in ("query", "key", "value", "new_tokens")))
    states = {s.name: tensors[f"past_{s.name}"] for s in ATTENTION.states_with(attributes)}
    output, present = kernel(inputs, AttentionState(**states, length=tensors["past_length"]), in_place)
    found = present.tensors()
    return {"output": output, **{f"present_{name}": found[name] for name in states}}


register(ATTENTION, _compute)


def attention(inputs: Inputs, state: AttentionState) -> tuple[Tensor, AttentionState]:
    """Call `torch.ops.still.attention`: traceable as one node, right on every device.

    Args:
        inputs: With `new_tokens`.

    Returns:
        output [B, T, H, D] and the state after the call.
    """
    assert inputs.new_tokens is not None
    past = {f"past_{name}": tensor for name, tensor in state.tensors().items()}
    results = call(ATTENTION, {**vars(inputs), **past}, {CACHE.name: state.cache})
    present = {name.removeprefix("present_"): tensor for name, tensor in results.items() if name != "output"}
    return results["output"], AttentionState(**present, length=state.length + inputs.new_tokens)


def attention_(
    query: Tensor, key: Tensor, value: Tensor, new_tokens: Tensor, length: Tensor | None, state: AttentionState | None
) -> Tensor:
    """The same with the new keys and values written into `state`, after `length` [B] tokens, and the output alone."""
    assert length is not None and state is not None
    states = [getattr(state, s.name) for s in ATTENTION.states]
    return torch.ops.still.attention_(query, key, value, new_tokens, length, *states, state.cache)
