"""The traced form of softmax attention: the torch op `still::attention`."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from still_export.mixers.torch_ops import Given, call, register
from still_graphs.ops.attention import ATTENTION
from still_graphs.ops.spec import AttributeValue
from still_kernels.attention import AttentionState
from still_kernels.attention.dispatch import attention as kernel


def _compute(given: Given, attributes: Mapping[str, AttributeValue]) -> dict[str, Tensor]:
    tensors = {name: tensor for name, tensor in given.items() if tensor is not None}
    query, key, value = (tensors[name] for name in ("query", "key", "value"))
    state = AttentionState(tensors["past_key"], tensors["past_value"], tensors["past_length"])
    output, present = kernel(query, key, value, state, tensors["new_tokens"])
    return {"output": output, "present_key": present.key, "present_value": present.value}


register(ATTENTION, _compute)


def attention(
    query: Tensor, key: Tensor, value: Tensor, state: AttentionState, new_tokens: Tensor
) -> tuple[Tensor, AttentionState]:
    """Call `torch.ops.still.attention`: traceable as one node, right on every device.

    Args:
        query, key, value, state, new_tokens: As of `still_kernels.attention.blocked_attention`.

    Returns:
        output [B, T, H, D] and the state after the call.
    """
    given = {
        "query": query,
        "key": key,
        "value": value,
        "new_tokens": new_tokens,
        "past_length": state.length,
        "past_key": state.key,
        "past_value": state.value,
    }
    results = call(ATTENTION, given, {})
    return results["output"], AttentionState(
        results["present_key"], results["present_value"], state.length + new_tokens
    )
