"""Every family's graph, lowered as for TensorRT with the bodies in the place of the plugins, before TensorRT-RTX's parser.

Its networks are strongly typed, as all of TensorRT 11's are: a type that the graph leaves open, or mixes, is an error there.
"""

from __future__ import annotations

from typing import Any

import onnx
import onnx_ir
import pytest
import torch

from still_export.export import trace_model
from still_export.lower import lower_program
from still_export.trt_package import kernel_variants
from still_graphs.passes.add_greedy_token import add_greedy_token
from still_graphs.passes.attach_functions import attach_functions
from still_graphs.passes.inline_functions import inline_functions
from still_graphs.passes.lower_integers import lower_integers
from still_graphs.passes.lower_opset import lower_opset
from still_graphs.passes.replace_nonzero import replace_nonzero
from still_graphs.passes.take_general_branches import take_general_branches
from still_graphs.pipelines import run_pipeline
from tests.still_export.test_build import needs_rtx
from tests.still_export.tiny import FAMILIES, MIXED, still_model

INLINED = (inline_functions, take_general_branches, replace_nonzero, add_greedy_token, lower_opset, lower_integers)
CASES = [(torch.float16, {}), (torch.bfloat16, {"layer_types": MIXED})]


def portable(family: str, dtype: torch.dtype, still: dict[str, Any]) -> onnx.ModelProto:
    model = onnx_ir.to_proto(lower_program(trace_model(still_model(family, dtype, **still))))
    attach_functions(model)
    return model


def refusals(model: onnx.ModelProto) -> list[str]:
    """What TensorRT-RTX says against the graph."""
    import tensorrt_rtx_bindings as trt

    logger = trt.Logger(trt.Logger.INTERNAL_ERROR)
    network = trt.Builder(logger).create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    parser.parse(model.SerializeToString())
    return [str(parser.get_error(i)) for i in range(parser.num_errors)]


@needs_rtx
@pytest.mark.parametrize("family", [pytest.param(f, marks=[pytest.mark.slow] * (f != "llama")) for f in FAMILIES])
@pytest.mark.parametrize(("dtype", "still"), CASES, ids=["float16", "bfloat16-mixed"])
def test_strongly_typed_parser_reads_the_lowered_graph(family: str, dtype: torch.dtype, still: dict[str, Any]) -> None:
    model = portable(family, dtype, still)
    plugins = onnx.ModelProto()
    plugins.CopyFrom(model)
    run_pipeline(plugins, "trt")
    onnx.checker.check_model(plugins)
    (variant,) = kernel_variants(plugins)
    assert variant.dtype == str(dtype).removeprefix("torch.")
    for step in INLINED:
        step(model)
    assert refusals(model) == []
