"""The traced form: the torch op `still::routed_attention`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from still_export.mixers.torch_ops import Given, call, register
from still_graphs.spec import AttributeValue
from still_kernels.routed_attention.meaning import Inputs, RoutedState
from still_kernels.routed_attention.meaning import routed_attention as compute
from still_kernels.routed_attention.spec import ROUTED_ATTENTION


def _computed(given: Given, attributes: Mapping[str, AttributeValue], in_place: bool) -> dict[str, Tensor]:
    tensors = {name: tensor for name, tensor in given.items() if tensor is not None}
    state = RoutedState(*(tensors.pop(f"past_{name}") for name in RoutedState._fields))
    output, blocks, after = compute(Inputs(**tensors, keep_decay=int(attributes["keep_decay"])), state)
    present = {f"present_{name}": x for name, x in after._asdict().items()}
    return {"output": output, "blocks": blocks, **present}


register(ROUTED_ATTENTION, _computed)


def routed_attention(inputs: Inputs, state: RoutedState) -> tuple[Tensor, Tensor, RoutedState]:
    """As of the kernels; one node where a program is traced, which has no derivative."""
    if not torch.compiler.is_compiling():
        return compute(inputs, state)
    given = {**vars(inputs), **{f"past_{name}": x for name, x in state._asdict().items()}}
    results = call(ROUTED_ATTENTION, given, {"keep_decay": inputs.keep_decay})
    after = RoutedState(*(results[f"present_{name}"] for name in RoutedState._fields))
    return results["output"], results["blocks"], after
