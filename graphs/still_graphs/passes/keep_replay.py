"""Add the inputs of stateful ops as graph outputs, so that a part of a call's tokens can be folded into the earlier states.

A speculative call does not change the states. `fold_graph` then adds the accepted tokens, with the same ops and no linear layers. Caches
with one row for each position do not need it: rows of rejected tokens are overwritten.

requires: no functions; nodes in the order of their OpSpec.
ensures: an output `replay_<input>.<state>` for every activation of an op that has other states than rows by position.
"""

from __future__ import annotations

from collections.abc import Iterator

from still_graphs.edits import Writer, attribute, typed
from still_graphs.later_ir import ir
from still_graphs.ops import DOMAIN, OPS, OpSpec
from still_graphs.spec import CACHE, TensorSpec
from still_graphs.states import REPLAY


def keep_replay(model: ir.Model) -> int:
    """Add the outputs, in place, and return their number."""
    writer = Writer(model.graph)
    there = {str(value.name) for value in model.graph.outputs}
    added = 0
    for node, spec in list(_folded(model)):
        activation = next(value.dtype for value in node.outputs if value.dtype is not None)
        for value, tensor in _activations(node, spec):
            name = _name(node, spec, tensor.name)
            if name in there:
                continue
            dtype = value.dtype or (activation if tensor.dtype == "T" else ir.DataType.FLOAT)
            shape = ["batch", "tokens", *(value.shape or tensor.shape)[2:]]
            if value.producer() is None or value.is_graph_output():
                value = writer.node("Identity", [value], name)
            value.name = name  # no copy
            model.graph.outputs.append(typed(value, shape, dtype))
            added += 1
    return added


def fold_graph(model: ir.Model) -> ir.Model:
    """The graph that folds a part of a call's tokens into the states before the call.

    Args:
        model: Has the outputs of `keep_replay`.

    Returns:
        A graph with inputs `new_tokens` [B] (number of accepted tokens), `past_length` [B], the states before the call and its replay
        outputs. Outputs are the new states. It uses the functions of `model`.
    """
    graph = ir.Graph([], [], nodes=[], opset_imports=dict(model.opset_imports), name="fold")
    copies: dict[ir.Value, ir.Value] = {}

    def new_input(name: str, like: ir.Value) -> ir.Value:
        value = ir.Value(name=name, shape=like.shape, type=like.type)
        graph.inputs.append(value)
        return value

    def copied(value: ir.Value | None) -> ir.Value | None:
        if value is not None and value not in copies:
            if value.is_graph_input():
                copies[value] = new_input(str(value.name), value)
            elif value.is_initializer():
                new = ir.Value(name=value.name, shape=value.shape, type=value.type, const_value=value.const_value)
                graph.initializers.add(new)
                copies[value] = new
            else:
                _copy(value.producer())
        return None if value is None else copies[value]

    def _copy(node: ir.Node | None) -> ir.Node:
        assert node is not None
        new = ir.Node(
            node.domain,
            node.op_type,
            [copied(value) for value in node.inputs],
            node.attributes.values(),
            overload=node.overload,
            num_outputs=len(node.outputs),
            name=node.name,
        )
        graph.append(new)
        for old, value in zip(node.outputs, new.outputs, strict=True):
            value.name, value.shape, value.type = old.name, old.shape, old.type
            copies[old] = value
        return new

    replays = {str(value.name): value for value in model.graph.outputs}
    for node, spec in _folded(model):
        for value, tensor in _activations(node, spec):
            name = _name(node, spec, tensor.name)
            copies[value] = next((v for v in graph.inputs if v.name == name), None) or new_input(name, replays[name])
        states = {f"present_{state.name}" for state in spec.states}
        new = _copy(node)
        for name, value in zip(spec.output_names(), new.outputs, strict=False):
            if name in states and value.name:
                graph.outputs.append(value)
    return ir.Model(graph, ir_version=model.ir_version, functions=list(model.functions.values()))


def gives_replay(model: ir.Model) -> str:
    """The graph outputs every input of ops that `fold_graph` needs."""
    there = {value.name for value in model.graph.outputs}
    names = [_name(node, spec, t.name) for node, spec in _folded(model) for _, t in _activations(node, spec)]
    return "".join(f"no output {name}" for name in names[:1] if name not in there)


def _folded(model: ir.Model) -> Iterator[tuple[ir.Node, OpSpec]]:
    """Ops with states other than rows by position."""
    for node in model.graph:
        spec = OPS.get(node.op_type) if node.domain == DOMAIN else None
        if spec is None:
            continue
        spec = spec.resolve({CACHE.name: attribute(node, CACHE.name, CACHE.default)})
        growths = [state.growth for state in spec.states]
        if any(growth is None or (growth.rows, growth.per, growth.lag) != (1, 1, 0) for growth in growths):
            yield node, spec


def _activations(node: ir.Node, spec: OpSpec) -> Iterator[tuple[ir.Value, TensorSpec]]:
    """Inputs of the node with a row for each token."""
    for value, tensor in zip(node.inputs, spec.inputs, strict=False):
        if value is not None and tensor.role == "activation":
            yield value, tensor


def _name(node: ir.Node, spec: OpSpec, name: str) -> str:
    """Output name of an input: `replay_<input>.<state>`, with the op's first state."""
    first = node.inputs[len(spec.inputs)]
    assert first is not None
    return f"{REPLAY}{name}.{str(first.name).removeprefix('past_')}"
