"""Products of one value become one, with the same numbers, and read no weight before it is written."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper, numpy_helper

from still_export.graph.merge import THREE, merge_linear_layers
from tests.still_graphs.small_graph import HIDDEN, small_graph
from tests.still_graphs.test_passes_trt import assert_same, rollout


def test_merged_products_are_the_same_numbers() -> None:
    model = ir.from_proto(small_graph())
    assert merge_linear_layers(model) == 2, "q, kv and g read one value"
    merged = ir.to_proto(model)
    (product,) = [n for n in merged.graph.node if n.op_type == "MatMul" and n.input[0] == "hidden"]
    (weight,) = [i for i in merged.graph.initializer if i.name == product.input[1]]
    assert list(weight.dims) == [HIDDEN, 24 + 24 + 24]
    assert not {"q", "kv", "g"} & {i.name for i in merged.graph.initializer}, "no weight is held twice"
    onnx.checker.check_model(merged, full_check=True)
    assert_same(merged, rollout(small_graph()), 1e-6)
    assert merge_linear_layers(model) == 0


def test_of_few_products_those_of_one_size_are_merged() -> None:
    """Both of a feed-forward layer: their result is split into halves."""
    graph = small_graph()
    next(n for n in graph.graph.node if n.op_type == "MatMul" and n.input[1] == "g").input[0] = "x"  # another value
    weights = {i.name: i for i in graph.graph.initializer}
    alike = list(weights["q"].dims) == list(weights["kv"].dims)
    assert alike and merge_linear_layers(ir.from_proto(graph), THREE) == 1
    weights["kv"].CopyFrom(numpy_helper.from_array(np.zeros((HIDDEN, 8), np.float32), "kv"))
    assert merge_linear_layers(ir.from_proto(graph), THREE) == 0


def test_products_that_cannot_be_merged_stay() -> None:
    graph = small_graph()
    q = next(n for n in graph.graph.node if n.op_type == "MatMul" and n.input[1] == "q")
    q.input[0] = "x"  # another value
    graph.graph.node.append(helper.make_node("Transpose", ["kv"], ["used_twice"]))
    assert merge_linear_layers(ir.from_proto(graph)) == 0


def test_no_weight_is_read_before_it_is_written() -> None:
    model = ir.from_proto(small_graph())
    read: list[str] = []
    for name in ("q", "kv", "g"):
        value = model.graph.initializers[name]
        held = value.const_value
        assert held is not None

        def give(name: str = name, held: ir.TensorProtocol = held) -> ir.TensorProtocol:
            read.append(name)
            return held

        value.const_value = ir.LazyTensor(give, held.dtype, ir.Shape(held.shape), name=name)
    assert merge_linear_layers(model) == 2 and not read
    ir.to_proto(model)
    assert sorted(read) == ["g", "kv", "q"]
