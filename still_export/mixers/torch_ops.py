"""The torch custom ops of the domain "still": schema, fake and eager kernel made from an OpSpec. One node in an exported program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from still_graphs.ops import DOMAIN, OpSpec
from still_graphs.ops.spec import AttributeValue

Given = Mapping[str, Tensor | None]
Compute = Callable[[Given, Mapping[str, AttributeValue]], Mapping[str, Tensor]]
"""From inputs by name (states as past_<name>) and attributes to outputs by name (states as present_<name>)."""

Inputs = TypeVar("Inputs")

_TORCH_TYPES = {int: "int", float: "float", str: "str"}
_LIBRARY = torch.library.Library(DOMAIN, "DEF")


def torch_schema(spec: OpSpec) -> str:
    """Schema string of a torch op: inputs, past states, attributes; outputs, present states.

    A present state that the configuration does not have is returned as an empty tensor.
    """
    optional = {t.name for t in spec.inputs if t.optional} | {f"past_{s.name}" for s in spec.states if s.optional}
    tensors = [f"Tensor{'?' if name in optional else ''} {name}" for name in spec.input_names()]
    attributes = [f"{_TORCH_TYPES[type(a.default)]} {a.name}" for a in spec.attributes]
    returns = ", ".join("Tensor" for _ in spec.output_names())
    return f"{spec.torch_name}({', '.join(tensors + attributes)}) -> ({returns})"


def register(spec: OpSpec, compute: Compute) -> None:
    """Define `torch.ops.still.<torch_name>`, which computes by `compute`, differentiates through it, and traces as one node."""
    names, outputs = spec.input_names(), spec.output_names()

    def split(arguments: tuple[Any, ...]) -> tuple[dict[str, Any], dict[str, AttributeValue]]:
        attributes = dict(zip((a.name for a in spec.attributes), arguments[len(names) :], strict=True))
        return dict(zip(names, arguments, strict=False)), attributes

    def eager(*arguments: Any) -> tuple[Tensor, ...]:
        given, attributes = split(arguments)
        found = compute(given, attributes)
        missing = given[names[0]].new_empty(0, dtype=torch.float32)
        return tuple(found.get(name, missing).contiguous() for name in outputs)

    def fake(*arguments: Any) -> tuple[Tensor, ...]:
        """Shapes and dtypes of the results, all contiguous; states have the sizes that came in."""
        given, _ = split(arguments)
        sizes = {
            dim: tensor.shape[axis]
            for spec_of in spec.inputs
            if (tensor := given[spec_of.name]) is not None
            for axis, dim in enumerate(spec_of.shape)
        }
        like: Tensor = given[names[0]]
        results = [like.new_empty([sizes[d] for d in t.shape]) for t in spec.outputs]
        for state in spec.states:
            past = given[f"past_{state.name}"]
            results.append(like.new_empty(0, dtype=torch.float32) if past is None else past.new_empty(past.shape))
        return tuple(results)

    _LIBRARY.define(torch_schema(spec))
    _LIBRARY.impl(spec.torch_name, eager, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{spec.domain}::{spec.torch_name}", fake)


def call(spec: OpSpec, given: Given, attributes: Mapping[str, AttributeValue]) -> dict[str, Tensor]:
    """Call the op with inputs by name, absent ones left out; its outputs by name, states that it does not have left out."""
    op = getattr(getattr(torch.ops, spec.domain), spec.torch_name)
    results = op(*(given.get(name) for name in spec.input_names()), *(attributes[a.name] for a in spec.attributes))
    absent = {f"present_{s.name}" for s in spec.states if not s.exists(attributes)}
    return {n: tensor for n, tensor in zip(spec.output_names(), results, strict=True) if n not in absent}


def op_of_one_state(
    spec: OpSpec, inputs_type: type[Inputs], compute: Callable[[Inputs, Tensor], tuple[Tensor, Tensor]]
) -> Callable[[Inputs, Tensor], tuple[Tensor, Tensor]]:
    """Register an op of one output and one state whose inputs and attributes are fields of `inputs_type`.

    Returns:
        compute(inputs, state) itself, output and state after the call; where a program is traced one node of the op instead, which has no
        derivative.
    """
    (output,), (state,) = spec.outputs, spec.states
    past, present = f"past_{state.name}", f"present_{state.name}"

    def computed(given: Given, attributes: Mapping[str, AttributeValue]) -> dict[str, Tensor]:
        fields: dict[str, Any] = {name: tensor for name, tensor in given.items() if name != past}
        found = compute(inputs_type(**fields, **attributes), given[past])  # type: ignore[arg-type]
        return dict(zip((output.name, present), found, strict=True))

    register(spec, computed)

    def run(inputs: Inputs, before: Tensor) -> tuple[Tensor, Tensor]:
        if not torch.compiler.is_compiling():
            return compute(inputs, before)
        given = {t.name: getattr(inputs, t.name) for t in spec.inputs} | {past: before}
        results = call(spec, given, {a.name: getattr(inputs, a.name) for a in spec.attributes})
        return results[output.name], results[present]

    return run
