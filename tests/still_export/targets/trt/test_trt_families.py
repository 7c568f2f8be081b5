"""Every family's graph, lowered as for TensorRT with the bodies in the place of the plugins, before TensorRT-RTX's parser.

Its networks are strongly typed, as all of TensorRT 11's are: a type that the graph leaves open, or mixes, is an error there.
"""

import functools
from typing import Any

import numpy as np
import onnx
import onnx_ir
import pytest
import torch

from still_export.graph.lower import lower_program
from still_export.graph.trace import trace_model
from still_export.targets.registry import target_of
from still_export.targets.trt.package import _plugin_calls
from still_export.targets.trt.target import lower_opset
from still_export.targets.trt_rtx.replace_nonzero import replace_nonzero
from still_export.targets.trt_rtx.take_general_branches import take_general_branches
from still_graphs.ops import DOMAIN, OPS
from still_graphs.passes.add_greedy_token import add_greedy_token
from still_graphs.passes.inline_functions import inline_functions
from still_graphs.passes.lower_integers import lower_integers
from still_kernels.registry import kernels_of
from tests.still_export.fake_engine import restore_bodies
from tests.still_export.packages import needs_rtx
from tests.still_export.tiny import DENSE, MIXED, still_model
from tests.still_graphs.passes import applied, attach_functions, run_passes
from tests.still_graphs.protos import dimensions, initializers
from tests.still_graphs.written import outputs_of_calls

INLINED = (inline_functions, take_general_branches, replace_nonzero, add_greedy_token, lower_opset, lower_integers)
TWO: dict[str, Any] = {"layer_types": MIXED[:2], "sizes": {"num_hidden_layers": 2}}
CASES = [(torch.float16, {}), (torch.bfloat16, TWO)]


def portable(family: str, dtype: torch.dtype, still: dict[str, Any]) -> onnx.ModelProto:
    model = onnx_ir.to_proto(lower_program(trace_model(still_model(family, dtype, **still))))
    attach_functions(model)
    return model


@functools.cache
def portable_mixed(family: str) -> bytes:
    """The same in float32, mixed, serialized: both lowerings begin with it."""
    return portable(family, torch.float32, TWO).SerializeToString()


def answers(model: onnx.ModelProto) -> list[dict[str, np.ndarray]]:
    """Outputs of a prefill over a chunk boundary and of a step after it, on ONNX Runtime."""
    return outputs_of_calls(model, ((np.arange(n)[None] % 7 + 3, np.array([n])) for n in (20, 1)))


def refusals(model: onnx.ModelProto) -> list[str]:
    import tensorrt_rtx_bindings as trt

    logger = trt.Logger(trt.Logger.INTERNAL_ERROR)
    network = trt.Builder(logger).create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    parser.parse(model.SerializeToString())
    return [str(parser.get_error(i)) for i in range(parser.num_errors)]


def activations(node: onnx.NodeProto) -> list[str]:
    """Inputs of a still node that are activations: its first ones."""
    return list(node.input[: sum(t.role == "activation" for t in OPS[node.op_type].inputs)])


@pytest.mark.slow
@pytest.mark.parametrize(("target", "one_row"), [("trt8", False), ("trt8", True), ("trt", False)])
@pytest.mark.parametrize(
    "family",  # mistral's graph is llama's
    [pytest.param(name, marks=pytest.mark.long if name == "mistral" else []) for name in DENSE],
)
def test_lowering_keeps_the_numbers(family: str, target: str, one_row: bool) -> None:
    model = onnx.ModelProto.FromString(portable_mixed(family))
    expected = answers(model)
    run_passes(model, target_of(target).passes, traits=("one row",) if one_row else ())
    constants = {n.output[0] for n in model.graph.node if n.op_type == "Constant"} | set(initializers(model.graph))
    attended = {name for n in model.graph.node if n.domain == DOMAIN for name in (*activations(n), n.output[0])}
    shapes = dimensions(model.graph)
    assert {len(shapes[name]) for name in attended} == {3 if one_row else 4}
    computed = [n.output[0] for n in model.graph.node if n.op_type == "Reshape" and n.input[1] not in constants]
    assert all(any(isinstance(size, str) for size in shapes[name][2:]) for name in computed), "free sizes only"
    restore_bodies(model)
    for got, wanted in zip(answers(model), expected, strict=True):
        for name, value in wanted.items():
            np.testing.assert_allclose(got[name], value, atol=2e-5, rtol=2e-5, err_msg=name)


@pytest.mark.slow
@needs_rtx
@pytest.mark.parametrize(
    ("dtype", "still", "family"),
    [
        # Every family once, mixed; a graph without softmax layers has no kind of node more, and mistral's is llama's.
        pytest.param(
            dtype,
            still,
            family,
            marks=[pytest.mark.long] if (not still and family != "llama") or family == "mistral" else [],
            id=f"{str(dtype).removeprefix('torch.')}-{family}",
        )
        for dtype, still in CASES
        for family in DENSE
    ],
)
def test_strongly_typed_parser_reads_the_lowered_graph(family: str, dtype: torch.dtype, still: dict[str, Any]) -> None:
    model = portable(family, dtype, still)
    plugins = onnx.ModelProto()
    plugins.CopyFrom(model)
    run_passes(plugins, target_of("trt").passes)
    onnx.checker.check_model(plugins)
    calls = [call for node, call in _plugin_calls(onnx_ir.from_proto(plugins)) if node.op_type == "HybridAttention"]
    (variant,) = {kernels_of("HybridAttention").variant_of(call) for call in calls}  # chunks are too small for kernels
    assert variant.dtype == str(dtype).removeprefix("torch.")
    for step in INLINED:
        applied(step, model)
    assert refusals(model) == []
