"""The portable graph: names, shapes, size, and what it computes, against PyTorch."""

from collections import Counter
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from still_export.loading.torch import TorchModel
from still_export.models.load import load_model
from still_export.package.calls import Arrays, next_feed
from still_export.package.folder import Package
from tests.still_export.conftest import Exporter
from tests.still_export.tiny import CHUNK, MIXED, VOCAB, plain_model
from tests.tolerances import MODEL

pytestmark = pytest.mark.slow


def session_of(package: Package) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(str(package.model_path), providers=["CPUExecutionProvider"])


def ort_outputs(session: onnxruntime.InferenceSession, feed: Arrays) -> Arrays:
    """One call; inputs that the graph does not have are an error of the test."""
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feed), strict=True))


def reference_of(package: Package) -> TorchModel:
    config, dtype = package.manifest["config"], package.manifest["model"]["dtype"]
    model = load_model(config["model"], attach_untrained=config["attach_untrained"], dtype=dtype)
    return TorchModel(package.manifest, model)


def start_feed(runner: TorchModel, tokens: np.ndarray, capacity: int, counts: list[int] | None = None) -> Arrays:
    new_tokens = None if counts is None else np.array(counts, np.int64)
    return {**next_feed({}, tokens, new_tokens), **runner.empty_feed(tokens.shape[0], capacity)}


def draw(rows: int, tokens: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, (rows, tokens))


def assert_close(expected: Arrays, actual: Arrays, dtype: str = "float32") -> None:
    assert set(expected) == set(actual)
    for name in expected:
        np.testing.assert_allclose(
            actual[name].astype(np.float64),
            expected[name].astype(np.float64),
            atol=MODEL[dtype],
            rtol=MODEL[dtype],
            err_msg=name,
        )


@pytest.mark.parametrize("still", [{}, {"salient_per_chunk": 0}], ids=["salient", "none"])
def test_interface(still: dict[str, Any], export_tiny: Exporter) -> None:
    """Names, types and free dimensions are the manifest's; one still node a layer; no loop is unrolled."""
    package = export_tiny(**still)
    graph = onnx.load(package.model_path)
    onnx.checker.check_model(str(package.model_path), full_check=True)
    assert graph.ir_version == 10
    assert {o.domain: o.version for o in graph.opset_import} == {"": 23, "still": 1, "com.microsoft": 1}
    states = package.manifest["states"]
    inputs = {i.name: [d.dim_param or d.dim_value for d in i.type.tensor_type.shape.dim] for i in graph.graph.input}
    expected: dict[str, list[Any]] = {
        "input_ids": ["batch", "tokens"],
        "new_tokens": ["batch"],
        "past_length": ["batch"],
    }
    expected.update({f"past_{s['name']}": s["shape"] for s in states})
    assert inputs == expected
    outputs = [o.name for o in graph.graph.output]
    assert outputs == ["logits", *(f"present_{s['name']}" for s in states), "present_length"]
    nodes = Counter(node.op_type for node in graph.graph.node)
    layers = package.manifest["model"]["layers"]
    assert nodes["HybridAttention"] == layers
    assert len(graph.graph.node) < 40 * layers + 25
    assert "Loop" not in nodes and "Scan" not in nodes
    text = graph.SerializeToString()
    assert b"stack_trace" not in text and b"/still_export/" not in text


def test_tied_embeddings_are_stored_once(export_tiny: Exporter) -> None:
    package = export_tiny("qwen2", options=None)
    graph = onnx.load(package.model_path, load_external_data=False).graph
    config = load_model(package.manifest["config"]["model"]).config
    embedding = [i.name for i in graph.initializer if sorted(i.dims) == sorted((VOCAB, config.hidden_size))]
    assert config.tie_word_embeddings == (len(embedding) == 1)


@pytest.mark.parametrize("tied", [True, False])
def test_tying_follows_the_model(tied: bool, tmp_path: Any) -> None:
    from still_export.graph.lower import lower_program
    from still_export.graph.trace import trace_model
    from still_export.models import attach_untrained

    model = attach_untrained(plain_model("llama", torch.float32, tie_word_embeddings=tied, num_hidden_layers=1))
    graph = lower_program(trace_model(model)).graph
    shapes = [sorted(v.shape.numpy()) for v in graph.initializers.values() if v.shape is not None]
    assert shapes.count(sorted((VOCAB, 24))) == (1 if tied else 2)


CASES = [
    ("llama", "float32", {}),
    ("qwen3", "float32", dict(layer_types=MIXED)),
    ("mistral", "float32", dict(overflow="fold_oldest", capacity_tokens=4 * CHUNK, select_scope="kv_group_max")),
    ("llama", "float16", dict(salient_per_chunk=0)),
]


@pytest.mark.parametrize("family, dtype, still", CASES, ids=str)
def test_graph_equals_pytorch(export_tiny: Exporter, family: str, dtype: str, still: dict) -> None:
    """Any length, pieces across chunk boundaries, single tokens, ragged rows with an empty one, all from one graph."""
    package = export_tiny(family, dtype, **still)
    runner, session = reference_of(package), session_of(package)
    for tokens in (1, CHUNK - 1, 2 * CHUNK + 1, 5 * CHUNK + 3):
        feed = start_feed(runner, draw(1, tokens), tokens)
        assert_close(runner.infer(feed), ort_outputs(session, feed), dtype)
    calls = [[19, 0, 3], [1, 1, 1], [0, 22, 9], [1, 1, 1], [8, 2, 30], *[[1, 1, 1]] * 9]
    expected = runner.infer(start_feed(runner, draw(3, 1), 96, [0, 0, 0]))
    actual = ort_outputs(session, start_feed(runner, draw(3, 1), 96, [0, 0, 0]))
    for number, counts in enumerate(calls):
        tokens_in, new = draw(3, max(counts), seed=number), np.array(counts, np.int64)
        expected = runner.infer(next_feed(expected, tokens_in, new))
        actual = ort_outputs(session, next_feed(actual, tokens_in, new))
        live = {"logits": expected["logits"][new > 0]}
        assert_close({**expected, **live}, {**actual, "logits": actual["logits"][new > 0]}, dtype)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_untrained_attention_keeps_the_base_logits(family: str, tmp_path: Any) -> None:
    """Through the package, with the default chunks: every prompt of up to 128 tokens."""
    from still_export.graph.options import ExportOptions
    from still_export.targets.export import export

    base = plain_model(family, torch.float32)
    base.save_pretrained(tmp_path / "base")
    package = export(
        ExportOptions(str(tmp_path / "base"), attach_untrained=True, all_logits=True), tmp_path / "package"
    )
    runner, session = reference_of(package), session_of(package)
    tokens = draw(1, 128)
    expected = base(torch.from_numpy(tokens)).logits.detach().numpy()
    for length in (1, 2, 63, 64, 65, 127, 128):
        logits = ort_outputs(session, start_feed(runner, tokens[:, :length], length))["logits"]
        np.testing.assert_allclose(logits, expected[:, :length], atol=1e-4, rtol=0)


def test_all_logits(export_tiny: Exporter) -> None:
    package = export_tiny(options={"all_logits": True})
    runner, session = reference_of(package), session_of(package)
    feed = start_feed(runner, draw(2, 21), 32)
    outputs = ort_outputs(session, feed)
    assert outputs["logits"].shape == (2, 21, VOCAB)
    assert_close(runner.infer(feed), outputs)


def test_half_precision_logits_are_float32(export_tiny: Exporter) -> None:
    session = session_of(export_tiny("llama", "float16", salient_per_chunk=0))
    assert session.get_outputs()[0].type == "tensor(float)"


def test_bfloat16_exports_and_checks(export_tiny: Exporter) -> None:
    package = export_tiny("llama", "bfloat16", {"dtype": "bfloat16"})
    onnx.checker.check_model(str(package.model_path), full_check=True)
    kinds = {s["dtype"] for s in package.manifest["states"]}
    assert kinds == {"bfloat16", "float32"}


def test_bfloat16_checkpoint_becomes_a_package_that_runs(export_tiny: Exporter) -> None:
    """As most checkpoints are stored, and without asking for a type: the CPU provider has no bfloat16."""
    package = export_tiny("llama", "bfloat16")
    runner, session = reference_of(package), session_of(package)
    feed = start_feed(runner, draw(1, 3 * CHUNK), 3 * CHUNK)
    assert_close(runner.infer(feed), ort_outputs(session, feed))
