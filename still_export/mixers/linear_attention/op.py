"""The traced form of linear attention: the torch op `still::linear_attention`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from still_export.mixers.torch_ops import Given, call, register
from still_graphs.ops.linear_attention import LINEAR_ATTENTION
from still_graphs.ops.spec import AttributeValue
from still_kernels.linear_attention import Inputs, chunked_linear_attention


def _compute(given: Given, attributes: Mapping[str, AttributeValue]) -> dict[str, Tensor]:
    tensors: dict[str, Any] = dict(given)
    state = tensors.pop("past_recurrent_state")
    settings: dict[str, Any] = dict(attributes)
    output, present = chunked_linear_attention(Inputs(**tensors, **settings), state)
    return {"output": output, "present_recurrent_state": present}


register(LINEAR_ATTENTION, _compute)


def linear_attention(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """The op: one node of `torch.ops.still.linear_attention` where a program is traced, which has no derivative; else the form itself.

    Args:
        inputs: With `new_tokens`.
        state: [B, H, D, V], float32 (float64 for float64 inputs).

    Returns:
        output [B, T, H, G, V] and the state after the call.
    """
    if not torch.compiler.is_compiling():
        return chunked_linear_attention(inputs, state)
    given = {t.name: getattr(inputs, t.name) for t in LINEAR_ATTENTION.inputs} | {"past_recurrent_state": state}
    attributes = {a.name: getattr(inputs, a.name) for a in LINEAR_ATTENTION.attributes}
    results = call(LINEAR_ATTENTION, given, attributes)
    return results["output"], results["present_recurrent_state"]
