"""The traced form of softmax attention: the torch op `still::attention`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from still_export.mixers.torch_ops import Given, call, register
from still_graphs.ops.attention import ATTENTION
from still_graphs.ops.spec import AttributeValue
from still_kernels.attention import AttentionState, Inputs
from still_kernels.attention.dispatch import attention as kernel


def _compute(given: Given, attributes: Mapping[str, AttributeValue], in_place: bool) -> dict[str, Tensor]:
    tensors = {name: tensor for name, tensor in given.items() if tensor is not None}
    inputs = Inputs(*(tensors[name] for name in ("query", "key", "value", "new_tokens")))
    state = AttentionState(tensors["past_key"], tensors["past_value"], tensors["past_length"])
    output, present = kernel(inputs, state, in_place)
    return {"output": output, "present_key": present.key, "present_value": present.value}


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
    results = call(ATTENTION, {**vars(inputs), **past}, {})
    length = state.length + inputs.new_tokens
    return results["output"], AttentionState(results["present_key"], results["present_value"], length)


def attention_(
    query: Tensor, key: Tensor, value: Tensor, new_tokens: Tensor, length: Tensor | None, state: AttentionState | None
) -> Tensor:
    """The same with the new keys and values written into `state`, after `length` [B] tokens, and the output alone."""
    assert length is not None and state is not None
    output: Tensor = torch.ops.still.attention_(query, key, value, new_tokens, length, state.key, state.value)
    return output
