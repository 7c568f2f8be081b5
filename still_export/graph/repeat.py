"""Trace two of each kind of equal layers, and copy the graph of one for the others.

Of each kind of layer the first two are traced: what the second one shares with the first (cosines, lengths, masks), all that follow share.
So 30 layers of a kind cost what two cost; tracing, lowering and optimizing them is most of an export.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
from torch import Tensor, nn

from still_graphs.edits import store
from still_graphs.ops import DOMAIN, OPS
from still_graphs.states import State, StateTable

FIRST = "hidden"
"""Output of a trace with the first layer's input; `hidden.<layer>` are the layers' outputs."""

TRACED = 2
"""Layers of each kind that are traced."""


class LayersDiffer(Exception):
    """Layers that look equal share more than hidden states."""


def hidden_names(alike: Sequence[int]) -> list[str]:
    """Names of the hidden states that a trace outputs; none if it has all layers."""
    traced = sorted(set(alike))
    return [] if len(traced) == len(alike) else [FIRST, *(f"{FIRST}.{layer}" for layer in traced)]


def like(model: Any, states: StateTable) -> list[int]:
    """For each layer, the traced layer that it equals: itself, if it is one of the first two of its kind.

    Args:
        model: A STILL model of any family.
    """
    types = getattr(model.config, "layer_types", None)
    seen: dict[str, list[int]] = {}
    found = []
    for index, layer in enumerate(model.model.layers):
        layer_states = [_without_layer(s) for s in states if s.layer == index]
        kind = repr([types and types[index], layer_states, [*_parts(layer)]])
        alike = seen.setdefault(kind, [])
        if len(alike) < TRACED:
            alike.append(index)
        found.append(alike[-1])
    return found


def _without_layer(state: State) -> tuple[Any, ...]:
    """A state without its layer number; dimensions of counted rows are named by layer."""
    growth, shape = state.growth, state.shape
    if growth and growth.get("counted"):
        shape = tuple("" if size == growth["dimension"] else size for size in shape)
        growth = {**growth, "dimension": ""}
    return state.name.rsplit(".", 1)[0], shape, state.dtype, growth


Constants = Mapping[str, Sequence[float]]


def constants_of(layer: Any) -> Constants:
    """Inputs of a layer's op that are constants of its configuration, by name."""
    return {k: v for module in layer.modules() for k, v in getattr(module, "constants", {}).items()}


def _parts(layer: Any) -> Iterator[Any]:
    """Everything that distinguishes a layer, except number, weight values and constants; objects without a description equal no other."""
    for name, module in layer.named_modules():
        yield name, type(module)
        constants = getattr(module, "constants", {})
        yield {key: len(value) for key, value in constants.items()}
        for key, value in vars(module).items():
            if key.startswith("_") or key == "layer_idx":
                continue
            if is_dataclass(value) and not isinstance(value, type):
                value = [type(value), {k: v for k, v in vars(value).items() if k not in constants}]
            if isinstance(value, partial):  # such as an activation
                value = [value.func, value.args, value.keywords]
            plain = isinstance(value, bool | int | float | str | tuple | list | dict | type | None)
            yield key, repr(value) if plain else id(value)
    for name, weight in layer.named_parameters():
        yield name, weight.shape, weight.dtype
    for name, buffer in layer.named_buffers():
        yield name, buffer.tolist()


class Hidden:
    """The input of the first layer and the outputs of traced ones; emptied before each call. Also what each traced layer returns."""

    def __init__(self) -> None:
        self.states: list[Tensor] = []
        self.others: dict[int, int | None] = {}

    def add(self, layer: int, x: Tensor, result: Any) -> None:
        """Remember what `layer` returned for `x`: hidden states, or a tuple of them and Nones."""
        state, others = (result[0], result[1:]) if isinstance(result, tuple) else (result, None)
        if not isinstance(state, Tensor) or any(part is not None for part in others or ()):
            raise LayersDiffer("layers give the next one more than hidden states.")
        self.others[layer] = None if others is None else len(others)
        self.states += [state] if self.states else [x, state]

    def passed_on(self, template: int, state: Tensor) -> Any:
        """`state` in the form that the traced layer `template` returns."""
        others = self.others[template]
        return state if others is None else (state, *[None] * others)


class _Skipped(nn.Module):
    """Replaces a layer that is not traced: passes hidden states on, without weights, and describes itself like that layer."""

    def __init__(self, layer: nn.Module, template: int, hidden: Hidden) -> None:
        super().__init__()
        self._instead, self._template, self._hidden = (layer,), template, hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(self._instead[0], name)

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Any:
        return self._hidden.passed_on(self._template, hidden)


@contextlib.contextmanager
def only(model: Any, alike: Sequence[int]) -> Iterator[Hidden]:
    """Inside the block the model has only the layers that are like themselves; the others pass hidden states on.

    Args:
        alike: See `like`.

    Yields:
        The hidden states of traced layers; empty if all layers are traced.
    """
    layers, hidden = model.model.layers, Hidden()
    whole = list(layers)
    if len(set(alike)) == len(whole):
        yield hidden
        return

    def compute(own: Any, index: int, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = own(x, *args, **kwargs)
        hidden.add(index, x, result)
        return result

    try:
        for index, (layer, template) in enumerate(zip(whole, alike, strict=True)):
            if index == template:
                layer.forward = partial(compute, layer.forward, index)
            else:
                layers[index] = _Skipped(layer, template, hidden)
        yield hidden
    finally:
        for index, layer in enumerate(whole):
            layers[index] = layer
            layer.__dict__.pop("forward", None)


@dataclass(frozen=True)
class _Traced:
    """A traced layer: its nodes in order, its input and output hidden states, and their readers."""

    nodes: list[ir.Node]
    input: ir.Value
    result: ir.Value
    readers: Sequence[tuple[ir.Node, int]]


def repeat_layers(
    model: ir.Model,
    alike: Sequence[int],
    constants: Sequence[Constants],
    inputs: Sequence[str],
    outputs: Sequence[str],
) -> None:
    """Add the layers that were not traced to `model`, in place.

    Args:
        model: The graph of the traced layers, with the outputs `hidden` and `hidden.<layer>`, which it loses.
        constants: For each layer; see `constants_of`.
        inputs, outputs: Names of the whole model's, in order.

    Raises:
        LayersDiffer: A layer reads more of those before it than hidden states.
    """
    graph, traced = model.graph, sorted(set(alike))
    if len(traced) == len(alike):
        return
    layers = _layers(graph, traced)
    graph.outputs[:] = [value for value in graph.outputs if value.name in outputs]
    ends = dict[int, ir.Value]()
    for index, template in enumerate(alike):
        if index == template:
            run = index
            hidden, after = layers[index].result, layers[index].nodes[-1]
        else:
            hidden, after = _copy(graph, layers[template], (template, index), constants[index], hidden, after)
        ends[run] = hidden
    for run, hidden in ends.items():  # last: templates are copied as traced
        for node, place in layers[run].readers:
            node.replace_input_with(place, hidden)
    for values, names in ((graph.inputs, inputs), (graph.outputs, outputs)):
        by_name = {value.name: value for value in values}
        values[:] = [by_name[name] for name in names]


def _layers(graph: ir.Graph, traced: Sequence[int]) -> dict[int, _Traced]:
    """The traced layers: the nodes that compute their outputs and states and belong to no earlier layer."""
    results = {str(value.name): value for value in graph.outputs}
    hidden = results[FIRST]
    known = _made_of([hidden], set())
    owner = dict.fromkeys(known, -1)
    found = {}
    for layer in traced:
        result = results[f"{FIRST}.{layer}"]
        ends = [v for name, v in results.items() if name.startswith("present_") and name.endswith(f".{layer}")]
        made = _made_of([result, *ends], known)
        known |= made
        owner |= dict.fromkeys(made, layer)
        readers = [use for use in result.uses() if use.node not in made]
        found[layer] = _Traced([node for node in graph if node in made], hidden, result, readers)
        hidden = result
    dependent = {results[FIRST]}
    for node in graph:
        here = owner.get(node, len(graph))
        allowed = found[here].input if here in found else hidden
        read = dependent.intersection(node.inputs)
        for value in read - {allowed, results[FIRST]}:  # all may read what the first one does, which is no template
            maker = value.producer()
            if here >= 0 and (maker is None or owner.get(maker, len(graph)) != here):
                raise LayersDiffer(f"{node.name} reads {value.name} of another layer, which is no hidden state.")
        if read:
            dependent.update(node.outputs)
    return found


def _made_of(values: Iterable[ir.Value], known: set[ir.Node]) -> set[ir.Node]:
    """The nodes that compute `values`, without `known` ones and their inputs."""
    found, left = set[ir.Node](), list[ir.Value | None](values)
    while left:
        value = left.pop()
        node = None if value is None else value.producer()
        if node is not None and node not in known and node not in found:
            found.add(node)
            left += node.inputs
    return found


def _copy(
    graph: ir.Graph,
    layer: _Traced,
    numbers: tuple[int, int],
    constants: Constants,
    hidden: ir.Value,
    after: ir.Node,
) -> tuple[ir.Value, ir.Node]:
    """Copy a traced layer, `numbers[0]`, as `numbers[1]` after the node `after`; returns its hidden states and last node."""
    template, number = numbers
    values: dict[ir.Value | None, ir.Value | None] = {layer.input: hidden}
    own = _own_dimensions(graph, template)

    def sized(shape: ir.Shape | None) -> ir.Shape | None:
        """A template's shape with the layer's own dimensions."""
        return None if shape is None else ir.Shape([f"{d}.{number}" if str(d) in own else d for d in shape])

    def named(value: ir.Value) -> ir.Value:
        """The layer's own weight or state for the template's."""
        old = str(value.name)
        name = old.replace(f".layers.{template}.", f".layers.{number}.")
        if value.is_graph_input() and old.endswith(f".{template}"):
            name = f"{old.removesuffix(f'.{template}')}.{number}"
        if name == old or value.const_value is not None:  # a buffer, equal in all layers of a kind
            return value
        new = ir.Value(name=name, shape=sized(value.shape), type=value.type)
        (graph.inputs.append if value.is_graph_input() else graph.initializers.add)(new)
        return new

    for node in layer.nodes:
        for value in node.inputs:
            if value is not None and value not in values:
                values[value] = named(value) if value.producer() is None else value
        read = [values.get(value) for value in node.inputs]
        for place, name in enumerate(OPS[node.op_type].input_names() if constants and node.domain == DOMAIN else ()):
            if name in constants:
                read[place] = _constant(graph, constants[name], f"{node.name}.{name}.{number}")
        copy = ir.Node(
            node.domain,
            node.op_type,
            read,
            node.attributes.values(),
            overload=node.overload,
            num_outputs=len(node.outputs),
            name=f"{node.name}.{number}",
        )
        for old, new in zip(node.outputs, copy.outputs, strict=True):
            new.shape, new.type = sized(old.shape), old.type
            if old.is_graph_output() and old is not layer.result:
                new.name = f"{str(old.name).removesuffix(f'.{template}')}.{number}"
                graph.outputs.append(new)
            else:
                new.name = f"{old.name}.{number}" if old.name else ""
            values[old] = new
        graph.insert_after(after, copy)
        after = copy
    result = values[layer.result]
    assert result is not None
    return result, after


def _own_dimensions(graph: ir.Graph, layer: int) -> set[str]:
    """Symbols that occur only in the shapes of a layer's states."""
    here, others = set[str](), set[str]()
    for value in graph.inputs:
        found = here if str(value.name).endswith(f".{layer}") else others
        found.update(str(d) for d in value.shape or () if isinstance(d, ir.SymbolicDim) and d.value)
    return here - others


def _constant(graph: ir.Graph, values: Sequence[float], name: str) -> ir.Value:
    """An initializer with these float32 `values`: an existing one, or a new one with this name."""
    tensor = ir.tensor([*values], ir.DataType.FLOAT, name=name)
    for value in graph.initializers.values():
        tensor_here = value.const_value
        if tensor_here is not None and (tensor_here.dtype, tensor_here.shape) == (tensor.dtype, tensor.shape):
            if np.array_equal(tensor_here.numpy(), tensor.numpy()):
                return value
    return store(graph, tensor)
