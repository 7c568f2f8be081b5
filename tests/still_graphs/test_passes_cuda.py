"""Passes for packages with kernels of the GPU: the same numbers by fewer nodes, and what others read stays."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from still_export.targets.ort.target import ON_GPUS
from still_graphs.passes.strip_functions import strip_functions
from still_kernels.greedy_token.fuse import add_greedy_node
from still_kernels.low_rank_matmul.fuse import fuse_low_rank, fuse_low_rank_floats
from still_kernels.rotary_qkv.fuse_embeddings import fuse_rotary_embeddings
from still_kernels.swi_glu.fuse import fuse_all_gates
from tests.still_graphs import written
from tests.still_graphs.passes import applied, attach_functions, run_passes
from tests.still_graphs.written import demand_unchanged, outputs_of

WIDTH, RANK, SIZE, HEADS, KV_HEADS, MIDDLE, VOCABULARY = 48, 5, 8, 4, 2, 20, 77
PARTS = (HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE)
SHAPES = {"qkv.weight": (WIDTH, sum(PARTS)), "a": (WIDTH, RANK), "b": (RANK, sum(PARTS)), "gate.a": (WIDTH, RANK)}
SHAPES |= {
    "gate.b": (RANK, PARTS[0]),
    "gate.bias": (PARTS[0],),
    "gate_up": (PARTS[0], 2 * MIDDLE),
    "head": (MIDDLE, VOCABULARY),
}
DIMS: dict[str, int] = {
    "x": WIDTH,
    "qkv": sum(PARTS),
    "low": RANK,
    "thin": sum(PARTS),
    "sum": sum(PARTS),
    "both": 2 * MIDDLE,
}
DIMS |= dict(zip("qkv", PARTS, strict=True)) | dict.fromkeys(
    ("q.turned", "gate.low.out", "gate.sum", "gate", "gated"), PARTS[0]
)
DIMS |= {"k.turned": PARTS[1], "gate.low": RANK, "cos": SIZE, "sin": SIZE, "logits": VOCABULARY}
DIMS |= dict.fromkeys(("cos.half", "cos.other", "sin.half", "sin.other"), SIZE // 2)
DIMS |= dict.fromkeys(("up", "first", "bent", "silu", "product"), MIDDLE)


def model_of(dtype: str = "float16", more: tuple[str, ...] = (), **change: list[str]) -> onnx.ModelProto:
    """A layer in which attention is left out; `more`: values that are outputs too; `change`: inputs of the node that makes a value."""
    make = helper.make_node
    nodes = [
        make("MatMul", ["x", "qkv.weight"], ["qkv"]),
        make("MatMul", ["x", "a"], ["low"]),
        make("MatMul", ["low", "b"], ["thin"]),
        make("Add", ["qkv", "thin"], ["sum"]),
        make("Split", ["cos"], ["cos.half", "cos.other"], axis=-1, num_outputs=2),
        make("Split", ["sin"], ["sin.half", "sin.other"], axis=-1, num_outputs=2),
        make("Split", ["sum", "sizes"], ["q", "k", "v"], axis=-1),
        make("Neg", ["v"], ["v.read"]),  # before the gate's product
        make("RotaryEmbedding", ["q", "cos.half", "sin.half"], ["q.turned"], num_heads=HEADS),
        make("RotaryEmbedding", ["k", "cos.half", "sin.half"], ["k.turned"], num_heads=KV_HEADS),
        make("MatMul", ["x", "gate.a"], ["gate.low"]),
        make("MatMul", ["gate.low", "gate.b"], ["gate.low.out"]),
        make("Add", ["gate.low.out", "gate.bias"], ["gate.sum"]),
        make("Sigmoid", ["gate.sum"], ["gate"]),
        make("Mul", ["q.turned", "gate"], ["gated"]),
        make("MatMul", ["gated", "gate_up"], ["both"]),
        make("Split", ["both"], ["first", "up"], axis=-1, num_outputs=2),
        make("Sigmoid", ["first"], ["bent"]),
        make("Mul", ["first", "bent"], ["silu"]),
        make("Mul", ["silu", "up"], ["product"]),
        make("MatMul", ["product", "head"], ["logits"]),
    ]
    for node in nodes:
        if node.output[0] in change:
            node.input[:] = change[node.output[0]]
    random = np.random.default_rng(0)
    weights = {name: random.standard_normal(shape).astype(dtype) / 7 for name, shape in SHAPES.items()}
    shapes = {name: ["b", "t", size] for name, size in {**DIMS, "v.read": PARTS[2]}.items()}

    outputs = ["logits", "k.turned", "v.read", *more]
    return written.model_of(nodes, ["x", "cos", "sin"], outputs, shapes, weights | {"sizes": np.array(PARTS)}, dtype)


def run(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """The outputs for five tokens of two rows, by name."""
    random = np.random.default_rng(1)
    half = 9 * random.random((2, 5, SIZE // 2))
    angles = np.concatenate([half, half], axis=-1)
    return outputs_of(model, {"x": random.standard_normal((2, 5, WIDTH)), "cos": np.cos(angles), "sin": np.sin(angles)})


def kinds(model: onnx.ModelProto) -> Counter[str]:
    return Counter(written.kinds(model))


def test_a_layer() -> None:
    """The four passes behind each other: what is left of the layer, in an order that runs, with the same numbers."""
    model = model_of()
    expected = run(model)
    assert set(run_passes(model, ON_GPUS).values()) == {1, 2}
    ours = {"LowRankMatMul": 2, "RotaryQkv": 1, "SwiGlu": 1, "GreedyToken": 1}
    assert kinds(model) == {**ours, "MatMul": 3, "Neg": 1, "Mul": 1}
    onnx.checker.check_model(model)  # sorted, among others
    attach_functions(model, onnxruntime=True)
    found = run(model)
    token = found.pop("next_token")
    assert token.dtype == np.int32 and np.array_equal(token, found["logits"].argmax(-1))
    for name, value in expected.items():
        np.testing.assert_allclose(found[name].astype(float), value.astype(float), rtol=4e-3, atol=4e-3, err_msg=name)
    applied(strip_functions, model)
    assert not any(count for count in run_passes(model, ON_GPUS).values())


def test_bodies_of_standard_ops() -> None:
    """Those for other runtimes compute the same."""
    first, second = model_of(), model_of()
    for model, own in ((first, True), (second, False)):
        run_passes(model, ON_GPUS)
        attach_functions(model, onnxruntime=own)
    other = run(second)
    for name, value in run(first).items():
        np.testing.assert_allclose(other[name].astype(float), value.astype(float), rtol=4e-3, atol=4e-3, err_msg=name)


@pytest.mark.parametrize(
    ("join", "change"),
    [
        (fuse_low_rank, {"dtype": "float32"}),
        (fuse_low_rank, {"more": ("low", "gate.low")}),
        (fuse_low_rank_floats, {}),
        (fuse_low_rank_floats, {"dtype": "float32", "more": ("low", "gate.low")}),
        (fuse_rotary_embeddings, {"dtype": "float32"}),
        (fuse_rotary_embeddings, {"more": ("q",)}),
        (fuse_rotary_embeddings, {"k.turned": ["k", "cos.half", "cos.half"]}),
        (fuse_rotary_embeddings, {"q.turned": ["q", "cos.other", "sin.half"], "k.turned": ["k", "cos.other", "sin.half"]}),
        (fuse_all_gates, {"more": ("silu",)}),
        (fuse_all_gates, {"more": ("first",)}),
        (fuse_all_gates, {"silu": ["up", "bent"], "product": ["silu", "up"]}),
        (fuse_all_gates, {"product": ["silu", "bent"]}),
    ],
    ids=lambda value: value.__name__ if callable(value) else str(value),
)  # fmt: skip
def test_what_something_else_reads_stays(join: Callable[[onnx.ModelProto], int], change: dict[str, Any]) -> None:
    demand_unchanged(join, model_of(**change))


def test_pairs_of_float32() -> None:
    """Which kernels of CPUs have; their bodies compute the same."""
    plain, model = model_of("float32"), model_of("float32")
    assert applied(fuse_low_rank_floats, model) == 2 and kinds(model)["LowRankMatMul"] == 2
    attach_functions(model)
    other = run(model)
    for name, value in run(plain).items():
        np.testing.assert_allclose(other[name], value, rtol=1e-5, atol=1e-5, err_msg=name)


def test_parts_of_a_layer() -> None:
    """A pair whose sum is read on, and one without a sum; a gate without a bias, and one that something else reads."""
    model = model_of(more=("thin",))
    assert applied(fuse_low_rank, model) == 2 and kinds(model)["Add"] == 2
    model = model_of(gate=["gate.low.out"])
    model.graph.node.remove(next(node for node in model.graph.node if node.output[0] == "gate.sum"))
    assert rotary_of(model).input[2:] == ["sin", "", "gate.low.out"] and rotary_of(model).output[3] == "gate"
    model = model_of(more=("gate.sum",))
    assert len(rotary_of(model).input) == len(rotary_of(model).output) == 3 and kinds(model)["Sigmoid"] == 2


def rotary_of(model: onnx.ModelProto) -> onnx.NodeProto:
    """The node of the rotation, joined where it is not yet."""
    applied(fuse_low_rank, model)
    applied(fuse_rotary_embeddings, model)
    (found,) = (node for node in model.graph.node if node.op_type == "RotaryQkv")
    return found


def test_a_large_matrix_between_is_no_thin_one() -> None:
    """Few inputs, or many numbers between, are products like others."""
    model = model_of()
    model.graph.initializer[1].CopyFrom(numpy_helper.from_array(np.zeros((5, 5), np.float16), "a"))
    assert applied(fuse_low_rank, model) == 1
    model.graph.initializer[3].CopyFrom(numpy_helper.from_array(np.zeros((999, 300), np.float16), "gate.a"))
    assert applied(fuse_low_rank, model_of()) == 2 and applied(fuse_low_rank, model) == 0


def test_a_pair_of_an_adapter_that_is_chosen_later_stays() -> None:
    """Its rank is open: the matrices are inputs, of which initializers are what stands there without one."""
    model = model_of("float32")
    for name, shape in {"a": (WIDTH, "rank"), "b": ("rank", sum(PARTS))}.items():
        model.graph.input.append(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape))
    assert applied(fuse_low_rank_floats, model) == 1


def test_the_token_is_said_once() -> None:
    model = model_of(dtype="float32")
    assert applied(add_greedy_node, model) == 1 and applied(add_greedy_node, model) == 0
