"""The pass for what lies between two attentions: the same numbers by one node, and what others read or what is large stays."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from still_graphs.passes.fuse_between_attention import between_attention_fused, fuse_between_attention
from tests.still_graphs.steps import applied, attach_functions

HEADS, SIZE, ATTENDED, WIDTH, MIDDLE = 2, 16, 48, 32, 80
WIDTHS = {"query_width": HEADS * SIZE, "key_width": SIZE, "value_width": SIZE, "gate_width": HEADS * SIZE}
PARTS = sum(WIDTHS.values()) - WIDTHS["gate_width"]


def model_of(gated: bool = True, width: int = WIDTH, more: str = "", epsilon: float = 1e-5) -> onnx.ModelProto:
    """What stands between two attentions behind the other steps.

    more: A value that is an output, too. epsilon: Of the first norm.
    """
    make, kind = helper.make_node, onnx.TensorProto.FLOAT16
    gate_width = WIDTHS["gate_width"] if gated else 0

    def norm(x: str, y: str, weight: str, out: str, total: str) -> onnx.NodeProto:
        values: dict[str, Any] = {"domain": "com.microsoft", "epsilon": epsilon if out == "rows" else 1e-5}
        return make("SkipSimplifiedLayerNormalization", [x, y, weight], [out, "", "", total], out, **values)

    beside = ["cos", "sin", *(["bias", "gated"] if gated else [])]
    rotated = ["q", "k", "v", *(["g"] if gated else [])]
    widths: dict[str, Any] = {**WIDTHS, "gate_width": gate_width}
    nodes = [
        make("MatMul", ["attention", "w.output"], ["o"]),
        norm("residual", "o", "w.norm", "rows", "sum"),
        make("MatMul", ["rows", "w.gate_up"], ["both"]),
        make("SwiGlu", ["both"], ["middle"], domain="still", width=MIDDLE),
        make("MatMul", ["middle", "w.down"], ["d"]),
        norm("sum", "d", "w.next_norm", "next_rows", "layer"),
        make("MatMul", ["next_rows", "w.next"], ["qkv"]),
        *([make("MatMul", ["next_rows", "w.gate"], ["gated"])] if gated else []),
        make("RotaryQkv", ["qkv", *beside], rotated, "rotary", domain="still", **widths),
    ]
    random = np.random.default_rng(0)
    shapes = {"output": (ATTENDED, width), "norm": (width,), "gate_up": (width, 2 * MIDDLE), "down": (MIDDLE, width)}
    shapes |= {"next_norm": (width,), "next": (width, PARTS), "gate": (width, gate_width), "bias": (gate_width,)}
    given = {
        n: random.standard_normal(s).astype(np.float16) / np.float16(max(s[0], 1) ** 0.5 if len(s) > 1 else 1)
        for n, s in shapes.items()
    }
    weights = [numpy_helper.from_array(x, n if n == "bias" else f"w.{n}") for n, x in given.items() if x.size]
    sizes = {
        "attention": ATTENDED,
        "residual": width,
        "cos": SIZE,
        "sin": SIZE,
        "o": width,
        "rows": width,
        "sum": width,
    }
    sizes |= {"both": 2 * MIDDLE, "middle": MIDDLE, "d": width, "next_rows": width, "layer": width, "qkv": PARTS}
    sizes |= {"gated": gate_width, "q": HEADS * SIZE, "k": SIZE, "v": SIZE, "g": gate_width}

    def info(name: str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, kind, ["b", "t", sizes[name]])

    outputs = [*rotated, "layer", *([more] if more else [])]
    inner = {name for node in nodes for name in node.output} - {*outputs, ""}
    graph = helper.make_graph(
        nodes, "g", [info(n) for n in ("attention", "residual", "cos", "sin")], [info(n) for n in outputs], weights,
        value_info=[info(n) for n in sorted(inner)],
    )  # fmt: skip
    opsets = [
        helper.make_opsetid(domain, version) for domain, version in (("", 23), ("com.microsoft", 1), ("still", 1))
    ]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def run(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """The outputs for five tokens of two rows, by name."""
    attach_functions(model, onnxruntime=True)
    random = np.random.default_rng(1)
    given = {
        x.name: random.standard_normal((2, 5, x.type.tensor_type.shape.dim[2].dim_value)).astype(np.float16)
        for x in model.graph.input
    }
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, map(np.asarray, session.run(None, given)), strict=True))


@pytest.mark.parametrize("gated", [True, False])
def test_one_node(gated: bool) -> None:
    """It and the rotation are left, with the same numbers under the same names and the same weights."""
    expected, model = run(model_of(gated)), model_of(gated)
    assert applied(fuse_between_attention, model) == 1
    assert Counter(node.op_type for node in model.graph.node) == {"BetweenAttention": 1, "RotaryQkv": 1}
    assert not applied(between_attention_fused, model) and applied(fuse_between_attention, model) == 0
    assert [x.name for x in model.graph.initializer] == [x.name for x in model_of(gated).graph.initializer]
    onnx.checker.check_model(model)
    found = run(model)
    assert list(found) == list(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name].astype(float), value.astype(float), rtol=8e-3, atol=8e-3, err_msg=name)


@pytest.mark.parametrize(
    "change", [{"more": "rows"}, {"more": "o"}, {"more": "next_rows"}, {"width": 40}, {"epsilon": 1e-6}], ids=str
)
def test_what_does_not_fit_stays(change: dict[str, Any]) -> None:
    """What something else reads, sizes that kernels do not have, and norms that differ in what they add."""
    model = model_of(**change)
    before = [node.op_type for node in model.graph.node]
    assert applied(fuse_between_attention, model) == 0 and [node.op_type for node in model.graph.node] == before
