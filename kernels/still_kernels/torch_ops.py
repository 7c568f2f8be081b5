"""The torch custom ops of the domain "still": schema, fake and eager kernel made from an OpSpec. One node in an exported program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from still_graphs.ops import DOMAIN, OpSpec
from still_graphs.spec import AttributeValue

ByName = Mapping[str, Tensor | None]
Compute = Callable[[ByName, Mapping[str, AttributeValue], bool], Mapping[str, Tensor]]
"""Function from inputs by name (states as past_<name>), attributes, and whether states may be written in place, to outputs by name (states
as present_<name>)."""

F = TypeVar("F", bound=Callable[..., Any])

_TORCH_TYPES = {int: "int", float: "float", str: "str"}
_LIBRARY = torch.library.Library(DOMAIN, "DEF")


def torch_schema(spec: OpSpec, in_place: bool = False) -> str:
    """Schema string of a torch op: inputs, past states, attributes; outputs, present states.

    A present state that the configuration lacks is an empty tensor. The in-place op writes states and does not return them.
    """
    optional = {t.name for t in spec.inputs if t.optional} | {f"past_{s.name}" for s in spec.states if s.optional}
    kinds = {f"past_{s.name}": f"Tensor(a{i}!)" for i, s in enumerate(spec.states)} if in_place else {}
    tensors = [f"{kinds.get(name, 'Tensor')}{'?' if name in optional else ''} {name}" for name in spec.input_names()]
    attributes = [f"{_TORCH_TYPES[type(a.default)]} {a.name}" for a in spec.attributes]
    returns = ", ".join("Tensor" for _ in (spec.outputs if in_place else spec.output_names()))
    return f"{spec.torch_name}{'_' if in_place else ''}({', '.join(tensors + attributes)}) -> ({returns})"


def register(spec: OpSpec, compute: Compute) -> None:
    """Define `torch.ops.still.<torch_name>`, which runs `compute`, is differentiable and traces as one node, and `<torch_name>_`, which
    writes the states in place."""
    names, outputs = spec.input_names(), spec.output_names()

    def split(arguments: tuple[Any, ...]) -> tuple[dict[str, Any], dict[str, AttributeValue]]:
        attributes = dict(zip((a.name for a in spec.attributes), arguments[len(names) :], strict=True))
        return dict(zip(names, arguments, strict=False)), attributes

    def eager(*arguments: Any) -> Tensor | tuple[Tensor, ...]:
        by_name, attributes = split(arguments)
        found = compute(by_name, attributes, False)
        like: Tensor = by_name[names[0]]
        missing = (like.new_empty(0, dtype=torch.float32) for _ in outputs)  # outputs must not share memory
        return _returned(
            [found.get(name, nothing).contiguous() for name, nothing in zip(outputs, missing, strict=True)]
        )

    def shaped(*arguments: Any) -> list[Tensor]:
        """Shapes and dtypes of the results, all contiguous; states keep their sizes."""
        by_name, attributes = split(arguments)
        sizes: dict[Any, Any] = {}
        for name, spec_of in zip(names, spec.all_inputs(), strict=True):
            if (tensor := by_name[name]) is not None:
                for dim, size in zip(spec_of.shape, tensor.shape, strict=True):
                    sizes.setdefault(dim, size)  # a state's may count words of codes
        like: Tensor = by_name[names[0]]
        sizes |= attributes  # a symbol with the name of one has its value
        types = {"T": like.dtype, "int32": torch.int32, "float32": torch.promote_types(like.dtype, torch.float32)}
        results = [like.new_empty([sizes[d] for d in t.shape], dtype=types[t.dtype]) for t in spec.outputs]
        for state in spec.states:
            past = by_name[f"past_{state.name}"]
            results.append(like.new_empty(0, dtype=torch.float32) if past is None else past.new_empty(past.shape))
        return results

    def fake(*arguments: Any) -> Tensor | tuple[Tensor, ...]:
        return _returned(shaped(*arguments))

    def eager_in_place(*arguments: Any) -> Tensor | tuple[Tensor, ...]:
        by_name, attributes = split(arguments)
        found = compute(by_name, attributes, True)
        for state in spec.states_with(attributes):
            past, present = by_name[f"past_{state.name}"], found[f"present_{state.name}"]
            if present is not past:
                past.copy_(present)
        return _returned([found[t.name].contiguous() for t in spec.outputs])

    def fake_in_place(*arguments: Any) -> Tensor | tuple[Tensor, ...]:
        return _returned(shaped(*arguments)[: len(spec.outputs)])

    for in_place, kernel, shapes in ((False, eager, fake), (True, eager_in_place, fake_in_place)):
        _LIBRARY.define(torch_schema(spec, in_place))
        name = spec.torch_name + "_" * in_place
        _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{spec.domain}::{name}", shapes)


def _returned(outputs: list[Tensor]) -> Tensor | tuple[Tensor, ...]:
    """Results in the form of an op's schema: a single one is not a tuple."""
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def call(spec: OpSpec, by_name: ByName, attributes: Mapping[str, AttributeValue]) -> dict[str, Tensor]:
    """Call the op with inputs by name, without absent ones; returns outputs by name, without absent states."""
    op = getattr(getattr(torch.ops, spec.domain), spec.torch_name)
    results = op(*(by_name.get(name) for name in spec.input_names()), *(attributes[a.name] for a in spec.attributes))
    results = (results,) if isinstance(results, Tensor) else results
    absent = {f"present_{s.name}" for s in spec.states if not s.exists(attributes)}
    return {n: tensor for n, tensor in zip(spec.output_names(), results, strict=True) if n not in absent}


def traced_op(
    spec: OpSpec, inputs_type: type[Any], state_type: type[Any] | None = None, writes: bool = False
) -> Callable[[F], F]:
    """Register an op whose inputs and attributes are fields of `inputs_type`. Decorates the function that computes it.

    Args:
        state_type: The op's states, a named tuple; None: it has one tensor or no state.
        writes: Whether the function has a last argument that allows writing states in place.

    Returns:
        A decorator of a function of inputs and states that returns outputs in order, then the new states. The decorated function calls the
        original; in a traced program it is one node of the op, without a derivative.
    """

    def decorated(compute: F) -> F:
        def computed(by_name: ByName, attributes: Mapping[str, AttributeValue], in_place: bool) -> dict[str, Tensor]:
            tensors: dict[str, Any] = {name: tensor for name, tensor in by_name.items() if tensor is not None}
            before = [tensors.pop(f"past_{state.name}") for state in spec.states]
            states = [state_type(*before)] if state_type else before
            found = compute(inputs_type(**tensors, **attributes), *states, *([in_place] if writes else []))
            found = (*found[:-1], *found[-1]) if state_type else found
            return dict(zip(spec.output_names(), found, strict=True))

        register(spec, computed)

        @wraps(compute)
        def run(inputs: Any, *states: Any, **options: Any) -> Any:
            if not torch.compiler.is_compiling():
                return compute(inputs, *states, **options)
            before = states[0] if state_type else states[:1]
            past = {f"past_{state.name}": x for state, x in zip(spec.states, before, strict=True)}
            attributes = {a.name: getattr(inputs, a.name) for a in spec.attributes}
            given = {t.name: getattr(inputs, t.name) for t in spec.inputs}
            found = tuple(call(spec, {**given, **past}, attributes).values())
            outputs = len(spec.outputs)
            return (*found[:outputs], state_type(*found[outputs:])) if state_type else found

        return cast("F", run)

    return decorated
