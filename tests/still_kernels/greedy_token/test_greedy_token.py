"""still::GreedyToken over a whole vocabulary, and graphs without its kernel."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper

from still_graphs.functions import function_body
from still_graphs.ops import DOMAIN
from still_graphs.passes.add_greedy_token import add_greedy_token
from still_graphs.passes.lower_opset import lowering
from still_kernels.greedy_token.plan import Inputs
from tests.still_graphs.passes import applied

pytest.importorskip("triton")
cases = pytest.importorskip("tests.still_kernels.greedy_token.cases")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_gpu_of_a_whole_vocabulary(dtype: torch.dtype) -> None:
    from still_kernels.greedy_token.plan import OP

    logits = torch.randn(8, 1, 128256, device="cuda").to(dtype)
    logits[:, :, 128255] = logits[:, :, 77] = 9.0
    assert OP.run(Inputs(logits)).tolist() == [[77]] * 8


@pytest.mark.parametrize("lowered", [17, 23])
@pytest.mark.parametrize("name", cases.CASES)
def test_graphs_without_the_kernel(name: str, lowered: int) -> None:
    """The function body, and what engines have in its place, in their opset too."""
    logits = cases.call(name, torch.float16 if lowered == 17 else torch.float32).logits.numpy()
    node = helper.make_node("GreedyToken", ["logits"], ["body"], domain=DOMAIN)
    body = function_body(node, onnx.TensorProto.FLOAT, dims={})
    kind = helper.np_dtype_to_tensor_dtype(logits.dtype)
    inputs = [helper.make_tensor_value_info("x", kind, logits.shape)]
    outputs = [helper.make_tensor_value_info("logits", kind, logits.shape)]
    copied = helper.make_node("Identity", ["x"], ["logits"])
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid(DOMAIN, 1)]
    graph = helper.make_graph([copied], "g", inputs, outputs)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=11)
    applied(add_greedy_token, model)
    if lowered == 17:
        applied(lowering(17)[0], model)
    else:
        model.functions.append(body)
        model.graph.node.append(node)
        model.graph.output.append(helper.make_tensor_value_info("body", onnx.TensorProto.INT32, logits.shape[:2]))
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    _, *found = session.run(None, {"x": logits})
    for token in found:
        assert token.dtype == np.int32 and (token == cases.exact(cases.Inputs(torch.from_numpy(logits))).numpy()).all()
