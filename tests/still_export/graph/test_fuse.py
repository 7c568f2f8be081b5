"""Fused nodes and merged products compute what the nodes did that they stand for, in every family; what is no rotary embedding stays."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

from still_export.graph.fuse import fuse_nodes
from still_export.graph.lower import lower_program
from still_export.graph.merge import merge_linear_layers
from still_export.graph.trace import trace_model
from still_export.targets.ort.scales import part_scales
from still_export.targets.ort.target import ON_GPUS, THREE
from tests.still_export.tiny import DENSE, MIXED, still_model
from tests.still_graphs.passes import attach_functions, run_passes
from tests.still_graphs.written import outputs_of, outputs_of_calls

CASES: list[Any] = [
    # mistral's graph is llama's, which is qwen2's without biases: the case in float16 has it
    pytest.param(family, torch.float32, MIXED, marks=[pytest.mark.long] if family in ("llama", "mistral") else [])
    for family in DENSE
]
CASES.append(("llama", torch.float16, ("hybrid_attention",) * 3))


def outputs(model: onnx.ModelProto) -> list[dict[str, np.ndarray]]:
    """Of a ragged prefill of two rows and a step after it, as they stand: without ONNX Runtime's own fusions."""
    calls = [(np.arange(2 * max(n)).reshape(2, -1) % 7 + 3, np.array(n)) for n in ([20, 13], [1, 1])]
    return outputs_of_calls(model, calls, optimized=False)


def lowered(family: str, dtype: torch.dtype, layer_types: tuple[str, ...]) -> ir.Model:
    return lower_program(trace_model(still_model(family, dtype, layer_types=layer_types, capacity_tokens=64)))


@pytest.mark.slow
@pytest.mark.parametrize("family, dtype, layer_types", CASES, ids=str)
def test_fused_nodes_compute_the_same(family: str, dtype: torch.dtype, layer_types: Any) -> None:
    model = lowered(family, dtype, layer_types)
    plain = ir.to_proto(model)
    before = Counter(node.op_type for node in model.graph)
    gone = fuse_nodes(model)
    fused = ir.to_proto(model)
    after = Counter(node.op_type for node in model.graph)
    assert gone == before.total() - after.total() > 0
    assert after["RotaryEmbedding"] == before["Neg"] > 0 and after["Neg"] == 0
    assert {i.name for i in plain.graph.initializer} <= {i.name for i in fused.graph.initializer}
    gone = merge_linear_layers(model, THREE)
    merged = ir.to_proto(model)
    products = sum(node.op_type == "MatMul" for node in merged.graph.node)
    # query, key and value of each layer, and both products of its feed-forward layer
    assert gone == before["MatMul"] - products == 3 * len(layer_types)
    assert not any(i.name.endswith("0.self_attn.q_proj.weight") for i in merged.graph.initializer)
    joined = onnx.ModelProto()
    joined.CopyFrom(merged)
    counts = run_passes(joined, ON_GPUS)
    of_each = len(layer_types) if dtype == torch.float16 else 0
    assert counts["fuse_all_gates"] == counts["fuse_rotary_embeddings"] == of_each
    for graph in (plain, fused, merged, joined):
        attach_functions(graph)
    bound = {torch.float32: 2e-6, torch.float16: 4e-3}[dtype]
    for other in (fused, merged, joined):
        for expected, actual in zip(outputs(plain), outputs(other), strict=True):
            for name, value in expected.items():
                worst = np.abs(value[np.isfinite(value)].astype(np.float64)).max(initial=1)
                np.testing.assert_allclose(actual[name], value, rtol=0, atol=bound * worst, err_msg=name)


def rotary(halves: tuple[int, int] = (0, 1), other: bool = False, scale: tuple[int, ...] = (2,)) -> ir.Model:
    """x cos + rotated x sin, of the halves named; `other`: cos of angles whose halves differ; `scale`: factors of cos."""
    text = f"""
    <ir_version: 10, opset_import: ["" : 23]>
    g (float[B,T,3,4] x, float[B,T,2] f, float[B,T,2] g) => (float[B,T,3,4] y)
    <int64[1] two = {{2}}, float[{len(scale)}] scale = {{{", ".join(map(str, scale))}}}> {{
        angles = Concat <axis = -1> (f, {"g" if other else "f"})
        plain = Cos (angles)
        c = Mul (plain, scale)
        s = Sin (angles)
        cos = Unsqueeze (c, two)
        sin = Unsqueeze (s, two)
        h0, h1 = Split <axis = 3, num_outputs = 2> (x)
        minus = Neg (h{halves[1]})
        turned = Concat <axis = -1> (minus, h{halves[0]})
        a = Mul (x, cos)
        b = Mul (turned, sin)
        y = Add (b, a)
    }}"""
    return ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text)))


@pytest.mark.parametrize(
    "arguments, fuses",
    [({}, True), ({"halves": (1, 0)}, False), ({"other": True}, False), ({"scale": (1, 2, 3, 4)}, False)],
    ids=str,
)
def test_only_a_rotary_embedding_is_one(arguments: dict[str, Any], fuses: bool) -> None:
    model = rotary(**arguments)
    assert bool(fuse_nodes(model)) == fuses
    graph = ir.to_proto(model)
    onnx.checker.check_model(graph)
    rng = np.random.default_rng(0)
    feeds = {
        name: rng.standard_normal(shape, np.float32)
        for name, shape in (("x", (2, 5, 3, 4)), ("f", (2, 5, 2)), ("g", (2, 5, 2)))
    }
    found, expected = (outputs_of(m, feeds)["y"] for m in (graph, ir.to_proto(rotary(**arguments))))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("why", ["its axis is another", "its sum is of other shapes"])
def test_other_norms_stay(why: str) -> None:
    axis, shape = (1, "B,T,4") if why.startswith("its axis") else (-1, "1,1,4")
    text = f"""
    <ir_version: 10, opset_import: ["" : 23]>
    g (float[B,T,4] x, float[{shape}] z) => (float[B,T,4] y) <float[4] scale = {{1, 2, 3, 4}}> {{
        total = Add (x, z)
        y = RMSNormalization <axis = {axis}> (total, scale)
    }}"""
    assert fuse_nodes(ir.from_proto(onnx.parser.parse_model(text))) == 0


@pytest.mark.parametrize("rows", [1, 2])
def test_norms_scale_by_one_row_alone(rows: int) -> None:
    """ONNX Runtime's CUDA kernel takes the first row of a scale for all of them."""
    scales = np.array([[1, 2, 3, 4], [5, 6, 7, 8]][:rows], np.float32)
    shape, values = ("2,4", "1, 2, 3, 4, 5, 6, 7, 8") if rows == 2 else ("4", "1, 2, 3, 4")
    text = f"""
    <ir_version: 10, opset_import: ["" : 23]>
    g (float[B,2,4] x) => (float[B,2,4] y) <float[{shape}] scale = {{{values}}}> {{
        normed = RMSNormalization <axis = -1, epsilon = 0.0> (x, scale)
        y = Neg (normed)
    }}"""
    model = ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text)))
    part_scales(model)
    (norm,) = (node for node in model.graph if node.op_type == "RMSNormalization")
    assert norm.inputs[1] is not None and norm.inputs[1].shape == [4]
    assert sum(node.op_type == "Mul" for node in model.graph) == rows - 1
    x = np.random.default_rng(0).standard_normal((3, 2, 4), np.float32)
    expected = -x / np.sqrt((x * x).mean(-1, keepdims=True)) * scales
    np.testing.assert_allclose(outputs_of(ir.to_proto(model), {"x": x})["y"], expected, rtol=1e-5)
