"""Sizes of a call of an op without a state, from its spec. The op's `Inputs` is a dataclass with the names of the spec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from still_graphs.errors import ShapeError, UnsupportedError
from still_graphs.spec import OpSpec, dimension, in_numbers
from still_kernels.plan import Call, Plan


def tensors_of(inputs: object) -> dict[str, Tensor]:
    """The tensors that are given, by name."""
    return {name: x for name, x in vars(inputs).items() if isinstance(x, Tensor)}


def sizes_of(spec: OpSpec, shapes: Mapping[str, Sequence[int]], **known: int) -> dict[str, int]:
    """The numbers that an op's symbols stand for in a call.

    Args:
        shapes: Of the inputs that are given, by name. The first one with a symbol says what it is.
        known: Symbols that follow from something else than a shape.

    Raises:
        ShapeError: The shape of an input is not the spec's; it is named.
    """
    symbols = dict(known)
    for tensor in spec.inputs:
        if tensor.name not in shapes:
            continue
        shape = list(shapes[tensor.name])
        if len(shape) != len(tensor.shape):
            raise ShapeError(f"{tensor.name}: expected [{', '.join(map(str, tensor.shape))}], got {shape}.")
        for dim, size in zip(tensor.shape, shape, strict=True):
            if isinstance(dim, str):
                factor, symbol, divisor = dimension(dim)
                symbols.setdefault(symbol, size * divisor // factor)
        expected = list(in_numbers(tensor.shape, symbols))
        if shape != expected:
            raise ShapeError(f"{tensor.name}: expected {expected}, got {shape}.")
    return symbols


def check(plan: Plan, inputs: object) -> None:
    """Raise ShapeError naming the tensor whose type or shape is not the spec's, or with the message of the plan's check that fails.

    The activations' type is that of the first input.
    """
    spec, given = plan.spec, tensors_of(inputs)
    own = given[spec.inputs[0].name].dtype
    for tensor in spec.inputs:
        expected = own if tensor.dtype == "T" else getattr(torch, tensor.dtype)
        if tensor.name in given and given[tensor.name].dtype != expected:
            raise ShapeError(f"{tensor.name}: expected {expected}, got {given[tensor.name].dtype}.")
    shapes = {name: x.shape for name, x in given.items()}
    attributes = {a.name: getattr(inputs, a.name) for a in spec.attributes}
    sizes_of(spec, shapes, **{name: value for name, value in attributes.items() if isinstance(value, int)})
    try:
        plan.check(Call.of(spec, shapes, attributes, str(own).removeprefix("torch."), None))
    except UnsupportedError as error:
        raise ShapeError(str(error)) from None
