"""The traced forms: the torch ops `still::routed_attention` and `still::kept_attention`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from still_export.mixers.torch_ops import Given, call, register
from still_graphs.spec import AttributeValue, OpSpec
from still_kernels.kept_attention.meaning import Inputs as KeptInputs
from still_kernels.kept_attention.meaning import KeptState
from still_kernels.kept_attention.meaning import kept_attention as attend
from still_kernels.kept_attention.spec import KEPT_ATTENTION
from still_kernels.routed_attention.meaning import Inputs as RoutedInputs
from still_kernels.routed_attention.meaning import RoutedState
from still_kernels.routed_attention.meaning import routed_attention as rule
from still_kernels.routed_attention.spec import ROUTED_ATTENTION

Inputs = TypeVar("Inputs")
State = TypeVar("State", bound=Any)
Run = Callable[[Inputs, State, bool], tuple[Tensor, State]]
"""Of inputs, state and whether to write into it: output and the state after the call."""


def _op(
    spec: OpSpec, inputs_type: type[Inputs], state_type: type[State], run: Run[Inputs, State]
) -> Run[Inputs, State]:
    """Register an op of one output, whose inputs and attributes are fields of `inputs_type`, its states those of `state_type`.

    Returns:
        `run` itself; where a program is traced one node of the op instead, which has no derivative.
    """

    def computed(given: Given, attributes: Mapping[str, AttributeValue], in_place: bool) -> dict[str, Tensor]:
        tensors: dict[str, Any] = {name: tensor for name, tensor in given.items() if tensor is not None}
        state = state_type(*(tensors.pop(f"past_{name}") for name in state_type._fields))
        output, after = run(inputs_type(**tensors, **attributes), state, in_place)
        return {"output": output, **{f"present_{name}": x for name, x in after._asdict().items()}}

    register(spec, computed)

    def op(inputs: Inputs, state: State, in_place: bool) -> tuple[Tensor, State]:
        if not torch.compiler.is_compiling():
            return run(inputs, state, in_place)
        given = {**vars(inputs), **{f"past_{name}": x for name, x in state._asdict().items()}}
        results = call(spec, given, {a.name: getattr(inputs, a.name) for a in spec.attributes})
        return results["output"], state_type(*(results[f"present_{name}"] for name in state_type._fields))

    return op


routed_attention = _op(ROUTED_ATTENTION, RoutedInputs, RoutedState, lambda inputs, state, in_place: rule(inputs, state))
kept_attention = _op(KEPT_ATTENTION, KeptInputs, KeptState, attend)
