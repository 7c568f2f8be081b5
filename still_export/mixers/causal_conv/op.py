"""The traced form of the causal convolution: the torch op `still::causal_conv`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from still_export.mixers.torch_ops import Given, call, register
from still_graphs.ops.causal_conv import CAUSAL_CONV
from still_graphs.ops.spec import AttributeValue
from still_kernels.causal_conv import Inputs, whole_causal_conv


def _compute(given: Given, attributes: Mapping[str, AttributeValue]) -> dict[str, Tensor]:
    tensors: dict[str, Any] = dict(given)
    state = tensors.pop("past_conv_state")
    settings: dict[str, Any] = dict(attributes)
    output, present = whole_causal_conv(Inputs(**tensors, **settings), state)
    return {"output": output, "present_conv_state": present}


register(CAUSAL_CONV, _compute)


def causal_conv(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """The op: one node of `torch.ops.still.causal_conv` where a program is traced, which has no derivative; else the form itself.

    Args:
        inputs: With `new_tokens`.
        state: [B, C, K - 1].

    Returns:
        output [B, T, C] and the state after the call.
    """
    if not torch.compiler.is_compiling():
        return whole_causal_conv(inputs, state)
    given = {t.name: getattr(inputs, t.name) for t in CAUSAL_CONV.inputs} | {"past_conv_state": state}
    attributes = {a.name: getattr(inputs, a.name) for a in CAUSAL_CONV.attributes}
    results = call(CAUSAL_CONV, given, attributes)
    return results["output"], results["present_conv_state"]
