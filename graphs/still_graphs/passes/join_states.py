"""Give the graph the states that onnxruntime-genai keeps: two tensors of fixed size a layer, or a cache of keys and values.

  a node with several states   a node of the joined form: states of the activations' type in past_key_values.L.conv_state, float32 ones in
                               past_key_values.L.recurrent_state
  nodes with a state each      the same two; as they are, where a layer has one state of a type, else joined by standard ops
  a row for every position     past_key_values.L.key and .value, with the rows of the whole capacity

genai has one shape for each of both tensors in all layers, and needs both. It allocates and clears them once, and binds one buffer as past
and present. A cache of fixed size makes it refuse beams, which it would compute wrongly: where no layer has one, a small one is added.

requires: functions attached; `past_<state>.<layer>` and `present_<state>.<layer>` with their shapes; the capacity in the metadata.
ensures: no other states are left.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import dataclass

import onnx
from onnx import TensorProto, helper

from still_graphs.conditions import still_nodes
from still_graphs.errors import UnsupportedError
from still_graphs.functions.joined import PREFIX, STATES, joined_body, part_of, written
from still_graphs.on_proto import on_proto
from still_graphs.ops import OPS, OpSpec
from still_graphs.ops.spec import StateSpec
from still_graphs.passes.walk import Rewriter, attribute, opset_version, value_names
from still_graphs.states import rows_after

CAPACITY = "still.capacity"
"""Entry of the model's metadata: JSON of the manifest's field `capacity`."""
RECURRENT = ("conv_state", "recurrent_state")
"""genai's names of both tensors: the first has rank 3 at most, the second 4."""
CACHE = ("key", "value")
RANKS = (3, 4)


def past_name(layer: int | str, name: str) -> str:
    """genai's name of an input; "%d" for a layer makes the template of the names."""
    return f"past_key_values.{layer}.{name}"


def present_name(layer: int | str, name: str) -> str:
    """genai's name of an output."""
    return f"present.{layer}.{name}"


@dataclass
class _State:
    """A state of a node: where it stands, and its dimensions but the batch."""

    node: onnx.NodeProto
    spec: StateSpec
    past: str
    present: str
    shape: list[int]
    dtype: int


@on_proto
def join_states(model: onnx.ModelProto) -> int:
    """Replace the states, in place.

    Returns:
        Number of tensors that genai keeps a row.

    Raises:
        UnsupportedError: genai cannot keep the states of this model; the message names the layer.
    """
    layers: dict[int, list[_State]] = defaultdict(list)
    for state in _states(model):
        layers[int(state.past.rpartition(".")[2])].append(state)
    return _Joiner(model, layers).run()


def _states(model: onnx.ModelProto) -> list[_State]:
    recorded = {prop.key: prop.value for prop in model.metadata_props}
    if CAPACITY not in recorded:
        raise UnsupportedError(f"the graph's metadata has no {CAPACITY}; genai's states have a fixed size.")
    capacity = int(json.loads(recorded[CAPACITY])["capacity_tokens"])
    infos = {info.name: info.type.tensor_type for info in model.graph.input}
    found = []
    for node in still_nodes(model):
        spec = OPS[node.op_type]
        values = {a.name: attribute(node, a.name, a.default) for a in spec.attributes}
        pasts, presents = node.input[len(spec.inputs) :], node.output[len(spec.outputs) :]
        for state, past, present in zip(spec.states, pasts, presents, strict=False):
            if not past:
                continue
            shape = [d.dim_value for d in infos[past].shape.dim][1:]
            if state.growth is not None:
                shape[state.growth.axis - 1] = rows_after(state.growth.resolve(values), capacity, capacity)
            found.append(_State(node, state, past, present, shape, infos[past].elem_type))
    return found


class _Joiner:
    def __init__(self, model: onnx.ModelProto, layers: dict[int, list[_State]]) -> None:
        self.model, self.layers = model, layers
        self.graph = model.graph
        self.rewriter = Rewriter(self.graph, value_names(self.graph))
        self.before: dict[str, list[onnx.NodeProto]] = defaultdict(
            list
        )  # by the name of the first output of the node behind them
        self.after: list[onnx.NodeProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self.renamed: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, tuple[int, ...], int]] = {}  # of genai's tensors: layer, shape, type
        self.functions: dict[tuple[str, str, str], str] = {}

    def run(self) -> int:
        gone = {name for states in self.layers.values() for s in states for name in (s.past, s.present)}
        for layer, states in self.layers.items():
            self._cache(layer, [s for s in states if _is_cache(s)])
            self._recurrent(layer, [s for s in states if not _is_cache(s)])
        if not any(info.name.endswith(CACHE) for info in self.inputs):
            for name in CACHE:
                self._tensor(min(self.layers), name, [1, 1, 1], TensorProto.FLOAT)
                self._pass_on(min(self.layers), name)
        nodes = []
        for node in self.graph.node:
            nodes += [*self.before.get(node.output[0], []), node]
        self.rewriter.nodes = [*nodes, *self.after]
        self.rewriter.finish()
        for node in self.graph.node:
            node.input[:] = [self.renamed.get(name, name) for name in node.input]
            node.output[:] = [self.renamed.get(name, name) for name in node.output]
            # The exporter takes the number of rows from any input.
            if (
                node.op_type == "Shape"
                and node.input[0] in gone
                and (attribute(node, "start"), attribute(node, "end")) == (0, 1)
            ):
                node.input[0] = "input_ids"
        for infos, new in ((self.graph.input, self.inputs), (self.graph.output, self.outputs)):
            kept = [info for info in infos if info.name not in gone]
            del infos[:]
            infos.extend([*kept, *new])
        return len(self.inputs)

    def _cache(self, layer: int, states: list[_State]) -> None:
        """Keys and values of a softmax layer."""
        if not states:
            return
        if [s.spec.name for s in states] != list(CACHE) or states[0].shape != states[1].shape:
            names = ", ".join(f"{s.spec.name} {s.shape}" for s in states)
            raise UnsupportedError(f"layer {layer} keeps {names}; genai keeps one key and one value of the same size.")
        for name, state in zip(CACHE, states, strict=True):
            self._tensor(layer, name, state.shape, state.dtype)
            self._rename(layer, name, state)

    def _recurrent(self, layer: int, states: list[_State]) -> None:
        """All other states of a layer."""
        if not states:
            return
        if len({s.node.output[0] for s in states}) == 1 < len(states):
            self._join_node(layer, states)
            return
        for part, name in enumerate(RECURRENT):
            own = [s for s in states if part_of(OPS[s.node.op_type], s.spec.name) == part]
            if len(own) == 1 and len(own[0].shape) + 1 <= RANKS[part]:
                self._tensor(layer, name, own[0].shape, own[0].dtype)
                self._rename(layer, name, own[0])
            elif own:
                self._join_values(layer, part, own)
            else:
                self._tensor(layer, name, [1] * (RANKS[part] - 1), states[0].dtype if not part else TensorProto.FLOAT)
                self._pass_on(layer, name)

    def _join_node(self, layer: int, states: list[_State]) -> None:
        """Put the joined form of the op in the place of its node."""
        node, spec = states[0].node, OPS[states[0].node.op_type]
        shapes = {s.spec.name: s.shape for s in states}
        for part, name in enumerate(RECURRENT):
            own = [s for s in states if part_of(spec, s.spec.name) == part]
            size = sum(math.prod(s.shape) for s in own)
            self._tensor(layer, name, [1] * (RANKS[part] - 2) + [size], own[0].dtype)
        overload = self._function(node, spec, shapes)
        inputs = [*node.input[: len(spec.inputs)], *(past_name(layer, name) for name in RECURRENT)]
        outputs = [*node.output[: len(spec.outputs)], *(present_name(layer, name) for name in RECURRENT)]
        node.op_type, node.overload = PREFIX + node.op_type, overload
        node.input[:], node.output[:] = inputs, outputs
        node.attribute.append(helper.make_attribute(STATES, written(shapes)))

    def _function(self, node: onnx.NodeProto, spec: OpSpec, shapes: dict[str, list[int]]) -> str:
        """Overload of the joined form's function, made once for nodes that are alike."""
        key = node.op_type, node.overload, written(shapes)
        if key not in self.functions:
            self.functions[key] = str(len(self.functions) or "")
            version = opset_version(self.model)
            self.model.functions.append(joined_body(node, spec, self.functions[key], shapes, version))
        return self.functions[key]

    def _join_values(self, layer: int, part: int, states: list[_State]) -> None:
        """Several small states side by side in one tensor, by standard ops."""
        sizes, name = [math.prod(s.shape) for s in states], RECURRENT[part]
        ones = [1] * (RANKS[part] - 2)
        axis = len(ones) + 1
        self._tensor(layer, name, [*ones, sum(sizes)], states[0].dtype)
        r, pieces, begin = self.rewriter, [], 0
        for state, size in zip(states, sizes, strict=True):
            r.nodes = self.before[state.node.output[0]]
            bounds = [r.constant([n], "int64", hint=f"{state.past}.bound") for n in (begin, begin + size, axis)]
            piece = r.node("Slice", [past_name(layer, name), *bounds], hint=f"{state.past}.piece")
            shape = r.constant([0, *state.shape], "int64", hint=f"{state.past}.shape")
            r.node("Reshape", [piece, shape], state.past)
            r.nodes = self.after
            shape = r.constant([0, *ones, size], "int64", hint=f"{state.present}.shape")
            pieces.append(r.node("Reshape", [state.present, shape], hint=f"{state.present}.piece"))
            begin += size
        r.node("Concat", pieces, present_name(layer, name), axis=axis)

    def _tensor(self, layer: int, name: str, shape: list[int], dtype: int) -> None:
        """Declare one of genai's tensors; those of a name are alike in all layers."""
        known = self.shapes.setdefault(name, (layer, tuple(shape), dtype))
        if known[1:] != (tuple(shape), dtype):
            raise UnsupportedError(
                f"layers {known[0]} and {layer} have states of different sizes, {list(known[1])} and {shape} in {name}; genai has one "
                "size for all layers."
            )
        if 0 in shape:
            raise UnsupportedError(
                f"the states of layer {layer} have no row at this capacity. Export with a larger --capacity-tokens."
            )
        for infos, full in ((self.inputs, past_name(layer, name)), (self.outputs, present_name(layer, name))):
            infos.append(helper.make_tensor_value_info(full, dtype, ["batch", *shape]))

    def _rename(self, layer: int, name: str, state: _State) -> None:
        self.renamed |= {state.past: past_name(layer, name), state.present: present_name(layer, name)}

    def _pass_on(self, layer: int, name: str) -> None:
        """A tensor that genai wants and nothing uses."""
        self.rewriter.nodes = self.after
        self.rewriter.node("Identity", [past_name(layer, name)], present_name(layer, name))


def _is_cache(state: _State) -> bool:
    """Whether it holds rows of every position, as genai's own caches do."""
    return state.spec.growth is not None and state.spec.growth.per == 1
