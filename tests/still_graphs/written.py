"""Small graphs as exports write them, which passes are to change."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper

from still_graphs.ops import DOMAIN
from tests.still_graphs.passes import applied

Shape = Sequence[int | str]


def parsed(graph: str, opset: int = 23) -> onnx.ModelProto:
    """A model of a graph in ONNX's text."""
    model: onnx.ModelProto = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : {opset}, "{DOMAIN}" : 1]> {graph}'
    )
    return model


def model_of(
    nodes: Sequence[onnx.NodeProto],
    given: Sequence[str],
    outputs: Sequence[str],
    shapes: Mapping[str, Shape],
    weights: Mapping[str, np.ndarray],
    dtype: str = "float16",
) -> onnx.ModelProto:
    """A model of nodes; values have a type and a shape by name, weights of floating point are rounded to the type."""
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    made = [name for node in nodes for name in node.output if name in shapes and name not in outputs]
    given_, results, between = (
        [helper.make_tensor_value_info(name, kind, list(shapes[name])) for name in names]
        for names in (given, outputs, made)
    )
    held = [
        numpy_helper.from_array(value.astype(dtype) if value.dtype.kind == "f" else value, name)
        for name, value in weights.items()
    ]
    graph = helper.make_graph(nodes, "g", given_, results, held, value_info=between)
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def outputs_of(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What ONNX Runtime makes of the inputs, which are rounded to the model's types, by name."""
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    types = {i.name: helper.tensor_dtype_to_np_dtype(i.type.tensor_type.elem_type) for i in model.graph.input}
    names = [output.name for output in session.get_outputs()]
    found = session.run(None, {name: value.astype(types[name]) for name, value in feeds.items() if name in types})
    return {name: np.asarray(value) for name, value in zip(names, found, strict=True)}


def outputs_of_calls(
    model: onnx.ModelProto, calls: Iterable[tuple[np.ndarray, np.ndarray]], slots: int = 40, optimized: bool = True
) -> list[dict[str, np.ndarray]]:
    """The same of calls with ids [B, T] and how many of them are tokens, [B]; each call goes on from the states of the one before."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    types = {i.name: helper.tensor_dtype_to_np_dtype(i.type.tensor_type.elem_type) for i in model.graph.input}
    names, state, found = [o.name for o in session.get_outputs()], {}, list[dict[str, np.ndarray]]()
    for ids, counts in calls:
        if not found:
            sizes = {"batch": len(ids), "slots": slots, "capacity": 64}
            state = {
                i.name: np.zeros([sizes.get(d, d) for d in i.shape]) for i in session.get_inputs() if "past_" in i.name
            }
        feeds = {"input_ids": ids, "new_tokens": counts, **state}
        made = session.run(None, {name: value.astype(types[name]) for name, value in feeds.items()})
        found.append(dict(zip(names, made, strict=True)))
        state = {name: found[-1][name.replace("past", "present", 1)] for name in state}
    return found


def kinds(model: onnx.ModelProto) -> list[str]:
    """Types of nodes, in order."""
    return [node.op_type for node in model.graph.node]


def demand_unchanged(step: Any, model: onnx.ModelProto) -> None:
    """A pass finds nothing in a graph."""
    before = kinds(model)
    assert applied(step, model) == 0 and kinds(model) == before
