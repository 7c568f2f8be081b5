"""The pass that joins a split, rotations and a gate: the same numbers by one node, and what others read stays."""

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from still_graphs.ops import DOMAIN
from still_kernels.rotary_qkv.fuse import fuse_rotary
from tests.still_graphs import written
from tests.still_graphs.passes import applied, attach_functions
from tests.still_graphs.protos import attribute
from tests.still_graphs.written import demand_unchanged, kinds, outputs_of

HEADS, KV_HEADS, SIZE, VALUE, GATE = 5, 3, 8, 12, 28
SIZES = [HEADS * SIZE, KV_HEADS * SIZE, VALUE, GATE]
ANGLES = ("cos", "sin")


def rotation(part: str, heads: int, angles: tuple[str, str] = ANGLES, back: str = "") -> list[onnx.NodeProto]:
    """The rotation of a part as exports write it; `back`: the half that is negated."""
    make, n = helper.make_node, part
    return [
        make("Reshape", [n, f"{n}.view"], [f"{n}.x"]),
        make("Split", [f"{n}.x"], [f"{n}.first", f"{n}.second"], axis=3, num_outputs=2),
        make("Neg", [back or f"{n}.second"], [f"{n}.back"]),
        make("Concat", [f"{n}.back", f"{n}.first"], [f"{n}.turned"], axis=-1),
        make("Reshape", [angles[0], "spread"], [f"{n}.cos"]),
        make("Reshape", [angles[1], "spread"], [f"{n}.sin"]),
        make("Mul", [f"{n}.x", f"{n}.cos"], [f"{n}.near"]),
        make("Mul", [f"{n}.turned", f"{n}.sin"], [f"{n}.far"]),
        make("Add", [f"{n}.near", f"{n}.far"], [f"{n}.rotated"]),
    ]


def model_of(
    *, gate: bool = True, bias: bool = True, joined: bool = True, dtype: str = "float16", more: tuple[str, ...] = (), **change: Any
) -> onnx.ModelProto:  # fmt: skip
    """A split and what follows; `joined`: heads of queries and keys lie side by side in the end, `more`: values that are outputs too."""
    make = helper.make_node
    parts = ["q", "k", "v", "g"][: 4 if gate else 3]
    nodes = [make("Split", ["x", "sizes"], parts, name="split", axis=-1)]
    nodes += rotation("q", HEADS) + rotation("k", KV_HEADS, **change)
    if joined:
        nodes += [make("Reshape", [f"{n}.rotated", "flat"], [f"{n}.out"]) for n in ("q", "k")]
    if gate:
        nodes += [make("Add", ["g", "bias"], ["g.biased"])] if bias else []
        nodes += [make("Sigmoid", ["g.biased" if bias else "g"], ["gate"])]
    dims: dict[str, list[Any]] = {"x": ["b", "t", sum(SIZES[: len(parts)])]}
    dims |= {name: ["b", "t", SIZE] for name in ANGLES}
    dims |= {n: ["b", "t", size] for n, size in zip(parts, SIZES, strict=False)}
    dims |= {name: ["b", "t", GATE] for name in ("gate", "g.biased")}
    for n, heads in (("q", HEADS), ("k", KV_HEADS)):
        dims |= {f"{n}.{name}": ["b", "t", heads, SIZE] for name in ("x", "turned", "near", "far", "rotated")}
        dims |= {f"{n}.{name}": ["b", "t", heads, SIZE // 2] for name in ("first", "second", "back")}
        dims |= {f"{n}.{name}": ["b", "t", 1, SIZE] for name in ANGLES} | {f"{n}.out": dims[n]}
    outputs = [*(f"{n}.out" if joined else f"{n}.rotated" for n in ("q", "k")), "v", *(["gate"] if gate else []), *more]

    weights = {
        "bias": np.linspace(-2, 3, GATE),
        "sizes": np.array(SIZES[: len(parts)]),
        "q.view": np.array([0, 0, HEADS, SIZE]),
        "k.view": np.array([0, 0, KV_HEADS, SIZE]),
        "spread": np.array([0, 0, 1, SIZE]),
        "flat": np.array([0, 0, -1]),
    }
    return written.model_of(nodes, ["x", *ANGLES], outputs, dims, weights, dtype)


def run(model: onnx.ModelProto) -> list[np.ndarray]:
    """The outputs for five tokens of two rows, whose halves have angles of their own."""
    random = np.random.default_rng(1)
    sizes = {i.name: i.type.tensor_type.shape.dim[2].dim_value for i in model.graph.input}
    found = outputs_of(model, {name: random.standard_normal([2, 5, size]) for name, size in sizes.items()})
    return [y.astype(np.float64) for y in found.values()]


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize(("gate", "bias"), [(True, True), (True, False), (False, False)])
def test_one_node_of_the_same_numbers(gate: bool, bias: bool, joined: bool) -> None:
    model = model_of(gate=gate, bias=bias, joined=joined)
    expected = run(model)
    assert applied(fuse_rotary, model) == 1
    views = [] if joined else ["Constant", "Reshape"] * 2
    assert kinds(model) == ["RotaryQkv", *views]
    node = model.graph.node[0]
    assert node.domain == DOMAIN and list(node.input) == ["x", *ANGLES, *(["bias"] if bias else [])]
    assert [attribute(node, name) for name in ("query_width", "key_width", "value_width", "gate_width")] == [
        *SIZES[:3],
        SIZES[3] if gate else 0,
    ]
    attach_functions(model)
    for got, wanted in zip(run(model), expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-3, atol=2e-3)
    assert applied(fuse_rotary, model) == 0


@pytest.mark.parametrize(
    "change",
    [
        {"more": ("q.x",)},
        {"more": ("k.first",)},
        {"more": ("q.near",)},
        {"more": ("g.biased",)},
        {"angles": ("sin", "cos")},
        {"back": "k.first"},
        {"dtype": "float32"},
    ],
    ids=str,
)
def test_what_others_read_and_other_rotations_stay(change: dict[str, Any]) -> None:
    demand_unchanged(fuse_rotary, model_of(**change))


def test_angles_that_are_made_later_come_first() -> None:
    """They would not be there yet where the split was."""
    model = model_of()
    expected = run(model)
    graph = model.graph
    graph.node.insert(1, helper.make_node("Identity", ["cos"], ["late"]))
    graph.value_info.append(helper.make_tensor_value_info("late", TensorProto.FLOAT16, ["b", "t", SIZE]))
    for node in graph.node:
        if list(node.input) == ["cos", "spread"]:
            node.input[0] = "late"
    assert applied(fuse_rotary, model) == 1 and kinds(model) == ["Identity", "RotaryQkv"]
    attach_functions(model)
    onnx.checker.check_model(model)  # sorted, among others
    for got, wanted in zip(run(model), expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-3, atol=2e-3)
