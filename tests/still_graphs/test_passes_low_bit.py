"""Passes around low-bit products: the gate between two of them, and the first norm of a model; the same numbers by one node each."""

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from still_graphs.ops import DOMAIN
from still_kernels.add_rms_norm.fuse import fuse_norms
from still_kernels.dense_matmul.fuse import sum_in_float32
from still_kernels.swi_glu.fuse import fuse_gates
from tests.still_graphs import written
from tests.still_graphs.passes import applied, attach_functions
from tests.still_graphs.protos import attribute
from tests.still_graphs.written import demand_unchanged, kinds, outputs_of

WIDTH, MIDDLE, THIN, EPSILON = 32, 64, 8, 3e-4
SHAPES: dict[str, list[str | int]] = {
    **{name: ["b", "t", WIDTH] for name in ("tokens", "x", "normed", "fed", "y")},
    **{name: ["b", "t", MIDDLE] for name in ("gate", "up", "bent", "silu", "middle")},
    **{name: ["b", "t", 2 * MIDDLE] for name in ("coded", "adapted", "both")},
    "thin": ["b", "t", THIN],
}


def coded(name: str, inputs: int, outputs: int) -> dict[str, np.ndarray]:
    """A weight in 4 bits."""
    random = np.random.default_rng(len(name))
    blocks = random.integers(-(1 << 31), 1 << 31, (outputs, inputs // 8)).astype(np.int32)
    return {f"{name}.blocks": blocks, f"{name}.scales": 0.1 * random.standard_normal((outputs, inputs // 32))}


def model_of(
    norm: str = "x",
    halves: tuple[str, str] = ("gate", "up"),
    product: str = "MatMulNBits",
    adapter: bool = False,
    dtype: str = "float16",
    outputs: tuple[str, ...] = ("y",),
    late: bool = False,
    axis: int = -1,
) -> onnx.ModelProto:
    """Tokens, a norm and a feed-forward layer as low-bit exports write them; `late`: something reads the tokens before the norm."""
    make = helper.make_node
    random = np.random.default_rng(0)
    given = {
        "norm": 1 + 0.3 * random.standard_normal(WIDTH),
        "first": random.standard_normal((WIDTH, THIN)) / 6,
        "second": random.standard_normal((THIN, 2 * MIDDLE)) / 3,
        "dense": random.standard_normal((WIDTH, 2 * MIDDLE)) / 6,
        **coded("gate_up", WIDTH, 2 * MIDDLE),
        **coded("down", MIDDLE, WIDTH),
    }
    bits: dict[str, Any] = {"domain": DOMAIN, "bits": 4, "block_size": 32}
    nodes = [make("Mul", ["tokens", "half"], ["x"])]
    nodes += [make("Neg", ["x"], ["before"])] if late else []
    nodes += [make("RMSNormalization", [norm, "norm"], ["normed"], axis=-1, epsilon=EPSILON)]
    whole = "coded" if adapter else "both"
    if product == "MatMulNBits":
        nodes += [make("MatMulNBits", ["normed", "gate_up.blocks", "gate_up.scales"], [whole], **bits)]
    else:
        nodes += [make("MatMul", ["normed", "dense"], [whole])]
    if adapter:
        nodes += [
            make("MatMul", ["normed", "first"], ["thin"]),
            make("DenseMatMul", ["thin", "second", "", "", "coded"], ["both"], domain=DOMAIN),
        ]
    nodes += [
        make("Split", ["both", "sizes"], ["gate", "up"], axis=axis),
        make("Sigmoid", ["gate"], ["bent"]),
        make("Mul", [halves[0], "bent"], ["silu"]),
        make("Mul", ["silu", halves[1]], ["middle"]),
        make("MatMulNBits", ["middle", "down.blocks", "down.scales"], ["fed"], **bits),
        make("Add", ["x", "fed"], ["y"]),
    ]

    given |= {"sizes": np.array([MIDDLE] * 2), "half": np.array(0.5)}
    shapes = SHAPES | {name: SHAPES["x"] for node in nodes for name in node.output if name not in SHAPES}
    return written.model_of(nodes, ["tokens"], outputs, shapes, given, dtype)


def run(model: onnx.ModelProto) -> np.ndarray:
    """The output for five tokens of two rows, small enough that the epsilon counts."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    attach_functions(copy)
    found = outputs_of(copy, {"tokens": 0.05 * np.random.default_rng(1).standard_normal((2, 5, WIDTH))})
    return next(iter(found.values())).astype(np.float64)


@pytest.mark.parametrize("adapter", [False, True])
def test_a_layer_of_the_same_numbers(adapter: bool) -> None:
    model = model_of(adapter=adapter)
    expected = run(model)
    applied(sum_in_float32, model)
    assert applied(fuse_norms, model) == applied(fuse_gates, model) == 1
    thin = ["DenseMatMul", "DenseMatMul"] if adapter else []
    assert kinds(model) == ["Mul", "AddRmsNorm", "MatMulNBits", *thin, "SwiGlu", "MatMulNBits", "Add"]
    nodes = {node.op_type: node for node in model.graph.node}
    norm, gate = nodes["AddRmsNorm"], nodes["SwiGlu"]
    assert list(norm.input) == ["x", "", "norm"] and list(norm.output) == ["x.read", "normed"]
    assert attribute(norm, "norm_epsilon") == pytest.approx(EPSILON) and norm.domain == gate.domain == DOMAIN
    assert list(nodes["Add"].input) == ["x.read", "fed"], "the norm's node alone reads the tokens"
    assert list(gate.input) == ["both"] and list(gate.output) == ["middle"] and attribute(gate, "width") == MIDDLE
    onnx.checker.check_model(model)
    assert np.linalg.norm(run(model) - expected) <= 2e-3 * np.linalg.norm(expected)
    assert applied(fuse_norms, model) == applied(fuse_gates, model) == 0


OTHERS: list[tuple[str, dict[str, Any]]] = [
    *(("gates", {"halves": halves}) for halves in (("up", "gate"), ("gate", "gate"))),
    *(("gates", {"outputs": ("y", more)}) for more in ("silu", "up")),
    *((kind, {"product": "MatMul"}) for kind in ("gates", "norms")),
    *((kind, {"dtype": "float32"}) for kind in ("gates", "norms")),
    ("gates", {"axis": 1}),
    *(("norms", change) for change in ({"norm": "tokens"}, {"outputs": ("y", "x")}, {"late": True})),
]


@pytest.mark.parametrize("kind, change", OTHERS, ids=str)
def test_other_gates_and_first_norms_stay(kind: str, change: dict[str, Any]) -> None:
    model = model_of(**change)
    applied(sum_in_float32, model)
    demand_unchanged({"gates": fuse_gates, "norms": fuse_norms}[kind], model)


def test_results_have_types() -> None:
    model = model_of()
    applied(fuse_norms, model)
    types = {info.name: info.type.tensor_type.elem_type for info in model.graph.value_info}
    assert types["x.read"] == TensorProto.FLOAT16
