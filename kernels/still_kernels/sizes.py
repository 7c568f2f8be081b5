"""Sizes of a call of an op, from its spec. The op's `Inputs` is a dataclass with the names of the spec.

Definitions of ops raise ShapeError, which names the tensor or attribute that does not fit, and CapacityError for a sequence longer than its
state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from still_graphs.errors import CapacityError, ShapeError, UnsupportedError, unknown
from still_graphs.spec import OpSpec, dimension, in_numbers
from still_kernels.plan import Call, Plan


def tensors_of(inputs: object) -> dict[str, Tensor]:
    """The present tensors, by name."""
    return {name: x for name, x in vars(inputs).items() if isinstance(x, Tensor)}


def sizes_of(spec: OpSpec, shapes: Mapping[str, Sequence[int]], **known: int) -> dict[str, int]:
    """Values of an op's symbols in a call.

    Args:
        shapes: Shapes of the present inputs, and of states as past_<name>. The first one with a symbol defines it.
        known: Symbols that do not come from a shape.

    Raises:
        ShapeError: The shape of an input differs from the spec; the message names it.
    """
    symbols = dict(known)
    for name, tensor in zip(spec.input_names(), spec.all_inputs(), strict=True):
        if name not in shapes:
            continue
        shape = list(shapes[name])
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


def sizes_of_call(spec: OpSpec, inputs: object, **states: Tensor) -> dict[str, int]:
    """Values of an op's symbols, from the tensors of a call.

    Raises:
        ShapeError: The shape of a tensor differs from the spec, or an attribute is unknown.
    """
    tensors = tensors_of(inputs) | {f"past_{name}": state for name, state in states.items()}
    sizes = sizes_of(spec, {name: x.shape for name, x in tensors.items()})
    for attribute in spec.attributes:
        value = getattr(inputs, attribute.name)
        if attribute.choices and value not in attribute.choices:
            raise unknown(value, attribute.choices, f"{attribute.name}={value!r}", ShapeError)
    return sizes


def counts_of(
    lengths: Tensor, new: Tensor, tokens: int, rows: int | None = None, per: int = 1
) -> list[tuple[int, int]]:
    """(tokens before the call, new tokens) of each sequence.

    Raises:
        ShapeError: A length is negative, or a new count is outside 0..`tokens`.
        CapacityError: A sequence outgrows a state of `rows`, each of `per` tokens.
    """
    found = list(zip(lengths.tolist(), new.tolist(), strict=True))
    for row, (length, count) in enumerate(found):
        if length < 0 or not 0 <= count <= tokens:
            raise ShapeError(f"sequence {row} has length {length} and {count} new tokens of {tokens}.")
        if rows is not None and length + count > rows * per:
            room = f"room for {rows}" if per == 1 else f"{rows} rows of {per}"
            raise CapacityError(
                f"sequence {row} grows to {length + count} tokens; the state has {room}. Give a larger state."
            )
    return found


def check(plan: Plan, inputs: object) -> None:
    """Raise ShapeError for a tensor whose type or shape differs from the spec, or with the message of a failed check of the plan.

    The activations' type is that of the first input.
    """
    spec, by_name = plan.spec, tensors_of(inputs)
    own = by_name[spec.inputs[0].name].dtype
    for tensor in spec.inputs:
        expected = own if tensor.dtype == "T" else getattr(torch, tensor.dtype)
        if tensor.name in by_name and by_name[tensor.name].dtype != expected:
            raise ShapeError(f"{tensor.name}: expected {expected}, got {by_name[tensor.name].dtype}.")
    shapes = {name: x.shape for name, x in by_name.items()}
    attributes = {a.name: getattr(inputs, a.name) for a in spec.attributes}
    sizes_of(spec, shapes, **{name: value for name, value in attributes.items() if isinstance(value, int)})
    try:
        plan.check(Call.of(spec, shapes, attributes, str(own).removeprefix("torch."), None))
    except UnsupportedError as error:
        raise ShapeError(str(error)) from None
