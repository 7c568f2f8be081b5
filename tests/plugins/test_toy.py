"""An op outside the tree in the native libraries: its folder is compiled in, and nothing else knows of it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from still_graphs.ops import DOMAIN, OPS
from tests.plugins.launches import made
from tests.still_graphs.node_model import session
from tests.toy.call import launch_decay
from tests.toy.meaning import Inputs, decay
from tests.toy.plan import KERNELS
from tests.toy.spec import DECAY

HEADS, DIM, DECAY_RATE = 3, 5, 0.25


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one registration of an op."""
    monkeypatch.setitem(OPS, DECAY.name, DECAY)


def node_model() -> onnx.ModelProto:
    """One node, without a body: the library alone can run it."""
    kinds = {"T": TensorProto.FLOAT, "float32": TensorProto.FLOAT, "int64": TensorProto.INT64}
    sizes = {"H": HEADS, "D": DIM}

    def infos(names: Any, tensors: Any) -> list[onnx.ValueInfoProto]:
        return [
            helper.make_tensor_value_info(name, kinds[t.dtype], [sizes.get(d, d) for d in t.shape])
            for name, t in zip(names, tensors, strict=True)
        ]

    node = helper.make_node(DECAY.name, DECAY.input_names(), DECAY.output_names(), domain=DOMAIN, decay=DECAY_RATE)
    inputs = infos(DECAY.input_names(), DECAY.all_inputs())
    outputs = infos(DECAY.output_names(), DECAY.all_outputs())
    graph = helper.make_graph([node], "toy", inputs, outputs)
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 23), helper.make_opsetid(DOMAIN, 1)], ir_version=10
    )


def test_its_parts_go_together() -> None:
    KERNELS.check()


def test_its_kernel_runs_in_onnx_runtime(library: str) -> None:
    run = session(node_model(), library=library)
    generator = torch.Generator().manual_seed(0)
    total, length = torch.zeros(2, HEADS, DIM), torch.zeros(2, dtype=torch.int64)
    for counts in ([7, 3], [1, 1], [0, 2]):
        new = torch.tensor(counts)
        value = torch.randn(2, max(counts), HEADS, DIM, generator=generator)
        output, expected = decay(Inputs(value, new, length, DECAY_RATE), total)
        feeds = dict(zip(DECAY.input_names(), (value, new, length, total), strict=True))
        got = run.run(None, {name: tensor.numpy() for name, tensor in feeds.items()})
        np.testing.assert_allclose(got[0], output.numpy(), rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(got[1], expected.numpy(), rtol=1e-6, atol=1e-6)
        total, length = expected, length + new
    with pytest.raises(Exception, match="Decay: sequence 1 has past_length 0 and new_tokens 8"):
        bad = {"new_tokens": np.array([0, 8]), "past_length": np.array([0, 0])}
        run.run(None, {name: tensor.numpy() for name, tensor in feeds.items()} | bad)


@pytest.mark.parametrize("tokens", [1, 150])
def test_the_core_launches_what_python_launches(mirror: Callable[..., None], tokens: int) -> None:
    tensors = {
        "value": made(2, tokens, HEADS, 70),
        "new_tokens": made(2, kind=torch.int32),
        "past_length": made(2, kind=torch.int32),
        "past_total": made(2, HEADS, 70, kind=torch.float32),
    }

    def run(output: torch.Tensor) -> None:
        launch_decay(tensors["value"], tensors["new_tokens"], tensors["past_total"], output, DECAY_RATE)

    mirror("Decay", tensors, {"decay": DECAY_RATE}, {"count_dtype": "int32"}, run=run)
