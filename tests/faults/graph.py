"""Faults of a graph and of the bodies of its ops, onnx.ModelProto."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.faults.registry import Random, fault, one, two

FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16)


def nodes_of(holder: Any) -> Iterator[Any]:
    """(list, index) of every node of a graph or body, those of subgraphs too."""
    for index, node in enumerate(holder.node):
        yield holder.node, index
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from nodes_of(attribute.g)


def bodies(model: onnx.ModelProto) -> Iterator[Any]:
    for function in model.functions:
        yield from nodes_of(function)


def on_node(kind: str, where: str, *ops: str) -> Callable[[Callable[..., bool | None]], Any]:
    """A fault of a random node of these types, of which the change is told its list, its place there and itself; False: not this one."""

    def register(change: Callable[..., bool | None]) -> Any:
        def plant(random: Random, model: onnx.ModelProto) -> bool:
            places = bodies(model) if where == "kernels" else nodes_of(model.graph)
            found = one(random, [(held, i) for held, i in places if held[i].op_type in ops])
            return found is not None and change(random, model, *found, found[0][found[1]]) is not False

        fault(where, kind)(plant)
        return change

    return register


def renamed(kind: str, where: str, of: str, to: str) -> None:
    """A node of one type that is of another."""
    on_node(kind, where, of)(lambda random, model, held, index, node: setattr(node, "op_type", to))


for pair in ("Less LessOrEqual", "LessOrEqual Less", "Greater GreaterOrEqual", "GreaterOrEqual Greater", "And Or"):
    renamed(f"a {pair.split()[1]} for a {pair.split()[0]} in a body", "kernels", *pair.split())
for pair in ("Add Sub", "Sub Add", "Max Min", "Min Max", "Mul Div"):
    renamed(f"a {pair.split()[1]} for a {pair.split()[0]} in a body", "kernels", *pair.split())
renamed("a Sub for an Add", "graph", "Add", "Sub")
renamed("an Add for a Mul", "graph", "Mul", "Add")
renamed("a Sin for a Cos", "graph", "Cos", "Sin")
renamed("a HardSigmoid for a Sigmoid", "graph", "Sigmoid", "HardSigmoid")
renamed("a Tanh for a Sigmoid", "graph", "Sigmoid", "Tanh")
renamed("a Tanh for a Sigmoid in a body", "kernels", "Sigmoid", "Tanh")


def replaced(held: Any, index: int, node: Any, extra: list[Any]) -> None:
    """Put `extra` behind a node, the last of which takes over the name of its first output."""
    name = node.output[0]
    node.output[0] = f"{name}__right"
    extra[0].input[0] = node.output[0]
    extra[-1].output[0] = name
    for number, each in enumerate(extra):
        held.insert(index + 1 + number, each)


def smaller(model: onnx.ModelProto) -> int:
    """The next smaller type."""
    half = any(v.type.tensor_type.elem_type == TensorProto.FLOAT16 for v in model.graph.input)
    return TensorProto.BFLOAT16 if half else TensorProto.FLOAT16


def rounding(kind: str, where: str, *ops: str) -> None:
    """What a node gives is rounded to the next smaller type and back."""

    @on_node(kind, where, *ops)
    def _(random: Random, model: onnx.ModelProto, held: Any, index: int, node: Any) -> None:
        down = helper.make_node("Cast", ["?"], [f"{node.output[0]}__low"], to=smaller(model))
        up = helper.make_node("CastLike", [down.output[0], f"{node.output[0]}__right"], ["?"])
        replaced(held, index, node, [down, up])


rounding("a linear layer's result in the wrong precision", "graph", "MatMul", "Gemm")
rounding("a norm in the wrong precision", "graph", "RMSNormalization", "SimplifiedLayerNormalization")
rounding(
    "an op's result in the wrong precision", "graph", "HybridAttention", "LinearAttention", "Attention", "CausalConv"
)
rounding("a product in a body in the wrong precision", "kernels", "MatMul", "Mul", "Softmax", "LinearAttention")


@on_node("the residual in the wrong precision", "graph", "SkipSimplifiedLayerNormalization")
def _(random: Random, model: onnx.ModelProto, held: Any, index: int, node: Any) -> None:
    names = [f"{node.name}__low", f"{node.name}__again"]
    held.insert(index, helper.make_node("CastLike", [names[0], node.input[0]], [names[1]]))
    held.insert(index, helper.make_node("Cast", [node.input[0]], [names[0]], to=smaller(model)))
    node.input[0] = names[1]


@on_node("the residual added twice", "graph", "SkipSimplifiedLayerNormalization")
def _(random: Random, model: onnx.ModelProto, held: Any, index: int, node: Any) -> None:
    node.input[0] = node.input[1]


def attribute(kind: str, change: Callable[[Any], bool]) -> None:
    """An attribute of an op of ours that is another."""

    def plant(random: Random, model: onnx.ModelProto) -> bool:
        ours = [a for n in model.graph.node if n.domain == "still" for a in n.attribute]
        return any(change(ours[number]) for number in random.permutation(len(ours)))

    fault("graph", kind)(plant)


def _scaled(a: Any) -> bool:
    a.f *= 1.01
    return bool(a.type == onnx.AttributeProto.FLOAT and a.f)


def _stepped(a: Any) -> bool:
    if a.type != onnx.AttributeProto.INT or a.name in ("chunk_size", "salient_per_chunk"):
        return False
    a.i = 1 - a.i if a.i in (0, 1) else a.i - 1
    return True


def _other(a: Any) -> bool:
    choices = {
        b"kv_group_max": b"kv_group_mean",
        b"softmax_pm": b"np_softmax_pm",
        b"np_softmax_pm": b"softmax_pm",
        b"silu": b"",
        b"gated_delta": b"gated",
        b"delta": b"linear",
        b"gated": b"linear",
    }
    if a.type != onnx.AttributeProto.STRING or a.s not in choices:
        return False
    a.s = choices[a.s]
    return True


attribute("an attribute times 1.01", _scaled)
attribute("an attribute off by one", _stepped)
attribute("an attribute that says another way", _other)


def _standard(model: onnx.ModelProto, where: str) -> list[Any]:
    """Attributes of standard ops, but for constants, subgraphs and target types of casts."""
    places = bodies(model) if where == "kernels" else nodes_of(model.graph)
    nodes = [held[i] for held, i in places if held[i].domain != "still" and held[i].op_type != "Constant"]
    kinds = onnx.AttributeProto.INT, onnx.AttributeProto.INTS, onnx.AttributeProto.FLOAT, onnx.AttributeProto.STRING
    return [a for node in nodes for a in node.attribute if a.type in kinds and a.name not in ("to", "stash_type")]


def standard(kind: str, where: str, *types: Any) -> None:
    """An attribute of a standard op that is another: an axis, a flag, a factor, a kind of reduction."""

    def plant(random: Random, model: onnx.ModelProto) -> bool:
        found = one(random, [a for a in _standard(model, where) if a.type in types])
        if found is None:
            return False
        if found.type == onnx.AttributeProto.INT:
            found.i = 1 - found.i if found.i in (0, 1) else found.i + 1
        elif found.type == onnx.AttributeProto.INTS:
            place = int(random.integers(len(found.ints)))
            found.ints[place] += 1 if found.ints[place] <= 0 else -1
        elif found.type == onnx.AttributeProto.FLOAT:
            found.f = found.f * 1.01 or 0.01
        else:
            found.s = {b"none": b"add", b"add": b"none", b"left": b"right", b"right": b"left"}.get(found.s, b"none")
        return True

    fault(where, kind)(plant)


for place, of in (("graph", "the graph"), ("kernels", "a body")):
    standard(f"an integer of a standard op in {of}", place, onnx.AttributeProto.INT, onnx.AttributeProto.INTS)
    standard(f"a factor of a standard op in {of}", place, onnx.AttributeProto.FLOAT)
    standard(f"a word of a standard op in {of}", place, onnx.AttributeProto.STRING)


for times in (10, 1000):

    @fault("graph", f"a norm's epsilon times {times}")
    def _(random: Random, model: onnx.ModelProto, times: int = times) -> bool:
        found = one(random, [a for n in model.graph.node for a in n.attribute if a.name == "epsilon"])
        if found is not None:
            found.f *= times
        return found is not None


def constant(kind: str, where: str, change: Callable[[Random, np.ndarray], np.ndarray | None]) -> None:
    """A constant of the graph or of a body that is another; None: not this one."""

    def plant(random: Random, model: onnx.ModelProto) -> bool:
        if where == "kernels":
            tensors = [
                a.t for h, i in bodies(model) if h[i].op_type == "Constant" for a in h[i].attribute if a.name == "value"
            ]
        else:
            tensors = [t for t in model.graph.initializer if np.prod(t.dims) <= 64 and "weight" not in t.name]
        for number in random.permutation(len(tensors)):
            found = change(random, numpy_helper.to_array(tensors[number]).copy())
            if found is not None:
                tensors[number].CopyFrom(numpy_helper.from_array(found, tensors[number].name))
                return True
        return False

    fault(where, kind)(plant)


def _times(random: Random, value: np.ndarray) -> np.ndarray | None:
    if value.dtype.kind != "f" or not np.isfinite(value).all() or not value.any():
        return None
    flat = value.reshape(-1)
    flat[int(random.integers(flat.size))] *= 1.01
    return value


def _more(random: Random, value: np.ndarray) -> np.ndarray | None:
    return value + 1 if value.dtype.kind == "i" and value.size == 1 else None


constant("a constant times 1.01 (a frequency of the rotation among them)", "graph", _times)
constant("a constant times 1.01 in a body", "kernels", _times)
constant("a number in a body off by one", "kernels", _more)


def exchanged(kind: str, where: str, *ops: str) -> None:
    """Two inputs of a node of these types, exchanged."""

    @on_node(kind, where, *ops)
    def _(random: Random, model: onnx.ModelProto, held: Any, index: int, node: Any) -> bool:
        if len(node.input) < 2:
            return False
        a, b = (1, 2) if node.op_type == "Where" else two(random, min(len(node.input), 3))
        node.input[a], node.input[b] = node.input[b], node.input[a]
        return True


exchanged("the branches of a Where exchanged", "kernels", "Where")
exchanged("the parts of a Concat exchanged", "kernels", "Concat")
exchanged("the sides of a Sub or Div exchanged", "kernels", "Sub", "Div")
exchanged("two inputs of an op exchanged", "graph", "HybridAttention", "LinearAttention", "Attention", "Concat")


@on_node("what is clipped is not", "kernels", "Clip")
def _(random: Random, model: onnx.ModelProto, held: Any, index: int, node: Any) -> None:
    node.op_type = "Identity"
    del node.input[1:]


@on_node("a slice of a body that is not gathered", "kernels", "Mod")
def _(random: Random, model: onnx.ModelProto, held: Any, index: int, node: Any) -> None:
    node.op_type = "Min"
    del node.attribute[:]


def outputs(kind: str, side: str) -> None:
    """Two layers' states of one kind, exchanged as outputs or as inputs."""

    def plant(random: Random, model: onnx.ModelProto) -> bool:
        names = [v.name for v in (model.graph.output if side == "present" else model.graph.input)]
        first = one(random, [n for n in names if n.startswith(f"{side}_") and "." in n])
        other = one(random, [n for n in names if n != first and n.split(".")[0] == str(first).split(".")[0]])
        if other is None:
            return False
        swap = {first: other, other: first}
        for node in model.graph.node:
            ends = node.output if side == "present" else node.input
            for number, name in enumerate(ends):
                ends[number] = swap.get(name, name)
        return True

    fault("graph", kind)(plant)


outputs("two layers' states exchanged as outputs", "present")
outputs("two layers' states exchanged as inputs", "past")


@fault("graph", "the logits times 1.02 in the graph")
def _(random: Random, model: onnx.ModelProto) -> bool:
    for index, node in enumerate(model.graph.node):
        if "logits" in node.output:
            kind = next(v.type.tensor_type.elem_type for v in model.graph.output if v.name == "logits")
            factor = np.array(1.02, helper.tensor_dtype_to_np_dtype(kind))
            model.graph.initializer.append(numpy_helper.from_array(factor, "fault_factor"))
            replaced(model.graph.node, index, node, [helper.make_node("Mul", ["?", "fault_factor"], ["?"])])
            return True
    return False
