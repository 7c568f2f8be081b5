"""Replace the graph's states by onnxruntime-genai's: two tensors of fixed size a layer, or a cache of keys and values.

  a node with several states   the joined form of the op: states in the activations' type, or words of codes, are in
                               past_key_values.L.conv_state, float32 states in past_key_values.L.recurrent_state
  nodes with one state each    the same two tensors: renamed if a layer has one state of a type, else joined by standard ops
  a row for every position     past_key_values.L.key and .value, with as many rows as the capacity

genai uses one shape for each of the tensors in all layers. It allocates and clears them once, and binds one buffer as past and present.
With a cache of fixed size it refuses beams, which it would compute wrongly; where no layer has a cache, a small unused one is added.

requires: functions attached; `past_<state>.<layer>` and `present_<state>.<layer>` with their shapes; the capacity in the metadata.
ensures: there are no other states.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from still_graphs.conditions import still_nodes
from still_graphs.edits import Writer, attribute, is_standard, known_sizes, put_in_place, sizes, typed
from still_graphs.errors import UnsupportedError
from still_graphs.later_ir import ir
from still_graphs.ops import OPS, OpSpec
from still_graphs.spec import StateSpec
from still_graphs.states import StateTable, rows_after

CAPACITY = "still.capacity"
"""Key of the model's metadata: JSON of the manifest's field `capacity`."""
RECURRENT = ("conv_state", "recurrent_state")
"""genai's names of the two tensors; the first has rank 3 at most, the second 4."""
CACHE = ("key", "value")
RANKS = (3, 4)


def past_name(layer: int | str, name: str) -> str:
    """genai's name of an input; layer "%d" gives the template of names."""
    return f"past_key_values.{layer}.{name}"


def present_name(layer: int | str, name: str) -> str:
    """genai's name of an output."""
    return f"present.{layer}.{name}"


@dataclass
class _Kept:
    """A state of an op, with its dimensions without the batch and the name of its type."""

    op: str
    spec: StateSpec
    shape: list[int]
    dtype: str

    @property
    def part(self) -> int:
        """Index of genai's tensor for it."""
        from still_graphs.functions.joined import part_of

        return part_of(OPS[self.op], self.spec.name)

    @property
    def is_cache(self) -> bool:
        """Whether it has a row for every position, like genai's own caches."""
        return self.spec.growth is not None and self.spec.growth.per == 1


@dataclass
class _State(_Kept):
    """A state of a node in a graph."""

    node: ir.Node
    past: ir.Value
    present: ir.Value


_Shapes = dict[str, tuple[list[int], str]]
"""Dimensions without the batch, and type, of genai's tensors of a layer, by name."""


def check_states(table: StateTable) -> None:
    """Raise UnsupportedError, before there is a graph, if genai cannot store these states; the message names the layer."""
    sizes = table.shapes(1, table.rows(table.capacity_tokens))
    layers: dict[int, list[_Kept]] = defaultdict(list)
    for state in table:
        if state.op:
            spec = OPS[state.op].state(state.name.rpartition(".")[0])
            layers[state.layer].append(_Kept(state.op, spec, [*sizes[state.name][1:]], state.dtype))
    _shapes_of(layers)


def _shapes_of(layers: Mapping[int, Sequence[_Kept]]) -> dict[int, _Shapes]:
    """The shapes of genai's tensors by layer; UnsupportedError if they differ between layers or genai has no such tensor."""
    found: dict[int, _Shapes] = {}
    first: dict[str, int] = {}
    for layer, states in layers.items():
        found[layer] = _cache_shapes(layer, [s for s in states if s.is_cache])
        found[layer] |= _recurrent_shapes([s for s in states if not s.is_cache])
        for name, (shape, dtype) in found[layer].items():
            other = first.setdefault(name, layer)
            if found[other][name] != (shape, dtype):
                raise UnsupportedError(
                    f"layers {other} and {layer} have states of different sizes, {found[other][name][0]} and {shape} in {name}; genai uses "
                    "one size for all layers. Export with --to onnx."
                )
            if 0 in shape:
                raise UnsupportedError(
                    f"the states of layer {layer} have no row at this capacity. Export with a larger --capacity-tokens."
                )
    return found


def _cache_shapes(layer: int, states: Sequence[_Kept]) -> _Shapes:
    """Keys and values of a softmax layer."""
    if states and ([s.spec.name for s in states] != list(CACHE) or states[0].shape != states[1].shape):
        names = ", ".join(f"{s.spec.name} {s.shape}" for s in states)
        raise UnsupportedError(
            f"layer {layer} stores {names}; genai stores one key and one value of equal sizes. Export with --to onnx."
        )
    return {name: (state.shape, state.dtype) for name, state in zip(CACHE, states, strict=False)}


def _recurrent_shapes(states: Sequence[_Kept]) -> _Shapes:
    """All states of a layer except keys and values: one of a part stays as it is, several are joined."""
    found: _Shapes = {}
    whole = len({s.op for s in states}) == 1 < len(states)
    for part, name in enumerate(RECURRENT if states else ()):
        own = [s for s in states if s.part == part]
        if len(own) == 1 and not whole and len(own[0].shape) + 1 <= RANKS[part]:
            found[name] = own[0].shape, own[0].dtype
        else:  # without states, 1 number that no node uses
            size = sum(math.prod(s.shape) for s in own) or int(not own)
            dtype = own[0].dtype if own else "float32" if part else states[0].dtype
            found[name] = [1] * (RANKS[part] - 2) + [size], dtype
    return found


def join_states(model: ir.Model) -> int:
    """Replace the states, in place.

    Returns:
        Number of genai's tensors per row.

    Raises:
        UnsupportedError: genai cannot store this model's states; the message names the layer.
    """
    layers: dict[int, list[_State]] = defaultdict(list)
    for state in _states(model):
        layers[int(str(state.past.name).rpartition(".")[2])].append(state)
    return _Joiner(model, layers).run()


def joined_states(model: ir.Model) -> str:
    """Check that all states are genai's."""
    sides = (model.graph.inputs, "past_", past_name), (model.graph.outputs, "present_", present_name)
    left = [
        str(value.name)
        for values, start, of in sides
        for value in values
        if str(value.name).startswith(start) and "." in str(value.name)
        if not str(value.name).startswith(of("", "")[:-1])
    ]
    return f"states that genai does not store, {', '.join(left[:3])}" if left else ""


def _states(model: ir.Model) -> list[_State]:
    if CAPACITY not in model.metadata_props:
        raise UnsupportedError(
            f"the graph's metadata has no {CAPACITY}; genai's states have a fixed size. Export with --to onnx."
        )
    capacity = int(json.loads(model.metadata_props[CAPACITY])["capacity_tokens"])
    found = []
    for node in still_nodes(model):
        spec = OPS[node.op_type]
        values = {a.name: attribute(node, a.name, a.default) for a in spec.attributes}
        pasts, presents = node.inputs[len(spec.inputs) :], node.outputs[len(spec.outputs) :]
        for state, past, present in zip(spec.states, pasts, presents, strict=False):
            if past is None:
                continue
            shape = known_sizes(past)[1:]
            if state.growth is not None:
                shape[state.growth.axis - 1] = rows_after(state.growth.resolve(values), capacity, capacity)
            assert past.dtype is not None
            found.append(_State(node.op_type, state, shape, past.dtype.numpy().name, node, past, present))
    return found


class _Joiner:
    def __init__(self, model: ir.Model, layers: dict[int, list[_State]]) -> None:
        self.model, self.layers, self.shapes = model, layers, _shapes_of(layers)
        self.graph = model.graph
        self.writer = Writer(self.graph)
        self.inputs: list[ir.Value] = []
        self.outputs: list[ir.Value] = []
        self.functions: dict[tuple[str, str, str], str] = {}

    def run(self) -> int:
        gone = {value for states in self.layers.values() for s in states for value in (s.past, s.present)}
        remaining = [
            [value for value in values if value not in gone] for values in (self.graph.inputs, self.graph.outputs)
        ]
        for layer, states in self.layers.items():
            for name, state in zip(CACHE, (s for s in states if s.is_cache), strict=False):
                self._rename(layer, name, state)
            self._recurrent(layer, [s for s in states if not s.is_cache])
        if not any(str(value.name).endswith(CACHE) for value in self.inputs):
            layer = min(self.layers)
            self.shapes[layer] |= dict.fromkeys(CACHE, ([1, 1, 1], "float32"))
            for name in CACHE:
                self._pass_on(layer, name)
        self.graph.inputs[:] = [*remaining[0], *self.inputs]
        self.graph.outputs[:] = [*remaining[1], *self.outputs]
        return len(self.inputs)

    def _recurrent(self, layer: int, states: list[_State]) -> None:
        """All states of a layer except keys and values."""
        if not states:
            return
        if len({s.node for s in states}) == 1 < len(states):
            self._join_node(layer, states)
            return
        for part, name in enumerate(RECURRENT):
            own = [s for s in states if s.part == part]
            if len(own) == 1 and self.shapes[layer][name][0] == own[0].shape:
                self._rename(layer, name, own[0])
            elif own:
                self._join_values(layer, part, own)
            else:
                self._pass_on(layer, name)

    def _join_node(self, layer: int, states: list[_State]) -> None:
        """Replace a node by the joined form of its op."""
        from still_graphs.functions.joined import (  # imports onnx, which programs that run packages lack
            PREFIX,
            STATES,
            written,
        )

        node, spec = states[0].node, OPS[states[0].node.op_type]
        shapes = {s.spec.name: s.shape for s in states}
        pasts = [self._tensor(layer, name) for name in RECURRENT]
        joined = ir.node(
            PREFIX + node.op_type,
            [*node.inputs[: len(spec.inputs)], *pasts],
            {**node.attributes, STATES: written(shapes)},
            domain=node.domain,
            overload=self._function(node, spec, shapes),
            num_outputs=len(spec.outputs) + len(RECURRENT),
            name=node.name,
        )
        self.writer.place = node
        self.writer.add(joined, [*(v.name for v in node.outputs[: len(spec.outputs)]), *RECURRENT])
        for old, new in zip(node.outputs, joined.outputs[: len(spec.outputs)], strict=False):
            put_in_place(old, new)
        for past, present in zip(pasts, joined.outputs[len(spec.outputs) :], strict=True):
            self._give(past, present)
        for state in states:
            self._read_batch_from_tokens(state.past)
            self.graph.outputs.remove(state.present)
        self.graph.remove(node, safe=True)

    def _function(self, node: ir.Node, spec: OpSpec, shapes: dict[str, list[int]]) -> str:
        """Overload of the joined form's function; nodes with equal shapes share it."""
        from still_graphs.functions.joined import joined_body, written

        key = node.op_type, node.overload, written(shapes)
        if key not in self.functions:
            self.functions[key] = str(len(self.functions) or "")
            version = self.model.opset_imports[""]
            joined = joined_body(ir.to_proto(node), spec, self.functions[key], shapes, version)
            body = ir.serde.deserialize_function(joined)
            self.model.functions[body.identifier()] = body
        return self.functions[key]

    def _join_values(self, layer: int, part: int, states: list[_State]) -> None:
        """Join several small states into one tensor by standard ops."""
        counts, name = [math.prod(s.shape) for s in states], RECURRENT[part]
        ones = [1] * (RANKS[part] - 2)
        axis = len(ones) + 1
        whole = self._tensor(layer, name)
        r, pieces, begin = self.writer, [], 0
        for state, size in zip(states, counts, strict=True):
            r.place, past, present = state.node, state.past.name, state.present.name
            self._read_batch_from_tokens(state.past)
            bounds = [r.constant([n], "int64", hint=f"{past}.bound") for n in (begin, begin + size, axis)]
            piece = r.node("Slice", [whole, *bounds], hint=f"{past}.piece")
            shape = r.constant([0, *state.shape], "int64", hint=f"{past}.shape")
            put_in_place(state.past, r.node("Reshape", [piece, shape], past))
            r.place = None
            shape = r.constant([0, *ones, size], "int64", hint=f"{present}.shape")
            pieces.append(r.node("Reshape", [state.present, shape], hint=f"{present}.piece"))
            begin += size
        self._give(whole, r.node("Concat", pieces, present_name(layer, name), axis=axis))

    def _tensor(self, layer: int, name: str) -> ir.Value:
        """A new input for one of genai's tensors."""
        shape, dtype = self.shapes[layer][name]
        value = ir.Value(name=past_name(layer, name))
        self.inputs.append(typed(value, ["batch", *shape], ir.DataType.from_numpy(np.dtype(dtype))))
        return self.inputs[-1]

    def _give(self, past: ir.Value, present: ir.Value) -> None:
        """Make `present` the output for `past`."""
        assert past.dtype is not None
        present.name = "present" + str(past.name).removeprefix("past_key_values")
        self.outputs.append(typed(present, sizes(past), past.dtype))

    def _rename(self, layer: int, name: str, state: _State) -> None:
        past = self._tensor(layer, name)
        state.past.replace_all_uses_with(past)
        self._give(past, state.present)

    def _pass_on(self, layer: int, name: str) -> None:
        """Add a tensor that genai needs and no node uses."""
        self.writer.place = None
        past = self._tensor(layer, name)
        self._give(past, self.writer.node("Identity", [past], present_name(layer, name)))

    def _read_batch_from_tokens(self, past: ir.Value) -> None:
        """Read the number of rows from the tokens; the exporter reads it from any input."""
        tokens = next(value for value in self.graph.inputs if value.name == "input_ids")
        for node, index in list(past.uses()):
            if is_standard(node, "Shape") and (attribute(node, "start"), attribute(node, "end")) == (0, 1):
                node.replace_input_with(index, tokens)
