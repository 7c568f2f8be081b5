"""Packages for browsers: the graph computes what the portable one does, in float32, from ops and files that onnxruntime-web takes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from still_export.errors import ConfigError, UnsupportedError
from still_export.graph.options import ExportOptions
from still_export.graph.quantization.policy import rounds_activations
from still_export.graph.quantization.read import package_source
from still_export.models.read.weights import value_of
from still_export.package.files import DATA
from still_export.package.folder import Package, open_package
from still_export.runtime.ort import OrtModel
from still_export.runtime.sampling import Sampling
from still_export.targets.export import export
from still_export.targets.lower import demand, lower
from still_export.targets.ort.options import OrtOptions
from still_export.targets.web import chats
from still_export.targets.web import target as web
from still_graphs.conditions import only_ops
from still_graphs.passes import dequantize_at_load as passes
from tests.still_export.serving.conftest import TEMPLATE
from tests.still_export.tiny import CHUNK, VOCAB, still_model
from tests.still_export.training import byte_tokenizer
from tests.still_export.verbs import call
from tests.still_graphs.passes import applied, run_passes

FOLDED = {"session.disable_quant_qdq": "1"}
"""What the browser's runner asks of a session."""
CORNERS = ({}, {"quantize": "int8"}, {"quantize": "int4"})


def logits(package: Package, ids: np.ndarray, config: dict[str, str] | None = None) -> np.ndarray:
    """Logits of one call from an empty state."""
    model = OrtModel(package.path, threads=1)
    if config:
        options = onnxruntime.SessionOptions()
        for key, value in config.items():
            options.add_session_config_entry(key, value)
        model.session = onnxruntime.InferenceSession(package.model_path, options)
    model.start()
    return model.feed(ids[None])


def exported(folder: Path, tokenizer: bool = False, **asked: Any) -> Package:
    """A portable package whose matrices have whole blocks."""
    if tokenizer:
        words = byte_tokenizer()
        words.chat_template = TEMPLATE
        words.save_pretrained(folder / "model")
    sizes = {"hidden_size": 96, "intermediate_size": 64, "head_dim": 16}
    still_model("llama", torch.float32, sizes=sizes).save_pretrained(folder / "model")
    return export(
        ExportOptions(str(folder / "model"), quantize_block=16 if asked else None, **asked),
        folder / "portable",
        options=OrtOptions(native=False),
    )


@pytest.fixture(scope="module", params=CORNERS, ids=str)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Package, Package]:
    """A package and what was lowered from it, which tests only read."""
    folder = tmp_path_factory.mktemp("pair")
    portable = exported(folder, **request.param)
    return portable, lower(portable.path, "web", folder / "web")


@pytest.mark.slow
def test_the_web_graph_computes_in_float32(pair: tuple[Package, Package], tmp_path: Path) -> None:
    portable, made = pair
    assert not rounds_activations(made.manifest)
    options = ExportOptions.from_manifest(portable.manifest)
    read = [package_source(options, p.path, p.manifest).weights for p in (portable, made)]
    for name, weight in read[0].items():
        assert torch.equal(value_of(weight), value_of(read[1][name])), name
    assert made.manifest["target"] == "web" and made.manifest["prefill_tokens"] == web.PREFILL_TOKENS
    ids = np.random.default_rng(0).integers(3, VOCAB, 3 * CHUNK + 5)
    exact = onnx.load(portable.model_path)
    for node in exact.graph.node:  # the portable graph rounds activations on CPUs that have a kernel for it
        if node.op_type == "MatMulNBits":
            next(a for a in node.attribute if a.name == "accuracy_level").i = passes.FLOAT32_ACTIVATIONS
    changed = tmp_path / "exact"
    changed.mkdir()
    onnx.save(exact, changed / "model.onnx")
    session = onnxruntime.InferenceSession(changed / "model.onnx")
    reference = OrtModel(portable.path, threads=1)
    reference.session = session
    reference.start()
    expected = reference.feed(ids[None])
    np.testing.assert_allclose(logits(made, ids), expected, atol=1e-4, rtol=1e-4)
    np.testing.assert_allclose(logits(made, ids, FOLDED), expected, atol=1e-4, rtol=1e-4)
    model = OrtModel(made.path, threads=1)
    model.start()
    reference.start()
    tokens = list(model.generate(ids.tolist(), 8, Sampling(0.8, seed=3)))
    assert tokens == list(reference.generate(ids.tolist(), 8, Sampling(0.8, seed=3)))


@pytest.mark.slow
def test_what_does_not_fit_is_not_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    portable = exported(tmp_path, quantize="int4")
    whole = lower(portable.path, "web", tmp_path / "whole")
    nodes = [n.op_type for n in onnx.load(whole.model_path).graph.node]
    assert "MatMulNBits" not in nodes and nodes.count("DequantizeLinear") > 4
    monkeypatch.setattr(passes, "EXPANDED_BYTES", 40_000)
    part = lower(portable.path, "web", tmp_path / "part")
    left = [n for n in onnx.load(part.model_path).graph.node if n.op_type == "MatMulNBits"]
    assert left and [n.op_type for n in onnx.load(part.model_path).graph.node].count("DequantizeLinear")
    assert {a.i for n in left for a in n.attribute if a.name == "accuracy_level"} == {1}
    ids = np.random.default_rng(1).integers(3, VOCAB, CHUNK + 2)
    np.testing.assert_allclose(logits(part, ids), logits(whole, ids), atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_weights_are_cut_into_files(
    pair: tuple[Package, Package], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    portable, whole = pair
    monkeypatch.setattr(web, "SHARD_BYTES", 48_000)
    made = lower(portable.path, "web", tmp_path / "cut")
    shards = [n for n in made.manifest["files"] if n.endswith(".data")]
    assert len(shards) > 1 and DATA not in made.manifest["files"]
    assert all(made.manifest["files"][n]["size_bytes"] <= 48_000 for n in shards)
    open_package(made.path)
    ids = np.random.default_rng(2).integers(3, VOCAB, CHUNK + 2)
    np.testing.assert_array_equal(logits(made, ids), logits(whole, ids))
    monkeypatch.setattr(web, "SHARD_BYTES", 1_000)
    with pytest.raises(UnsupportedError, match=r"a weight has [\d,]+ bytes, a file for browsers 1,000 at most"):
        lower(portable.path, "web", tmp_path / "none")


@pytest.mark.slow
def test_the_chat_template_lies_where_transformers_js_reads_it(tmp_path: Path) -> None:
    portable = exported(tmp_path, tokenizer=True)
    made = lower(portable.path, "web", tmp_path / "web")
    open_package(made.path)
    assert json.loads((made.path / "tokenizer_config.json").read_text())["chat_template"] == TEMPLATE
    assert made.manifest["chat"] == portable.manifest["chat"]


@pytest.mark.parametrize(
    ("asked", "message"),
    [({"adapters": True, "quantize": "int4"}, "--adapters"), ({"all_logits": True}, "--all-logits")],
)
def test_refusals(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        demand(web.WEB, ExportOptions("nowhere", **asked), web.WebOptions())


def test_half_precision_is_widened_unasked(tmp_path: Path) -> None:
    """A browser computes in float32 alone, so that is the default of --dtype; another type that is asked for is refused."""
    still_model("llama", torch.float16).save_pretrained(tmp_path / "model")
    assert call("export", tmp_path / "model", "--to", "web", "-o", tmp_path / "web") == 0
    assert open_package(tmp_path / "web").manifest["model"]["dtype"] == "float32"
    assert call("export", tmp_path / "model", "--to", "web", "--dtype", "float16", "-o", tmp_path / "half") == 2


def test_an_op_that_browsers_lack_is_named(small: onnx.ModelProto) -> None:
    assert not applied(only_ops(web.CONTRIB_OPS), small)
    small.graph.node[0].domain = "com.microsoft"
    small.opset_import.add(domain="com.microsoft", version=1)
    with pytest.raises(UnsupportedError, match=r"after the pass attach_own_functions.*nodes that the host has not"):
        run_passes(small, web.WEB.passes, traits=web.WEB.traits(OrtOptions()))


@pytest.fixture
def small() -> onnx.ModelProto:
    from tests.still_graphs.small_graph import small_graph

    model = small_graph()
    run_passes(model, web.WEB.passes, traits=web.WEB.traits(OrtOptions()))
    return model


@pytest.mark.parametrize("wrong", [(), (1,), (0, 2)])
def test_chats_that_the_page_renders_otherwise_are_named(
    wrong: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the page is built and Node.js is there; tests/web asks the engine itself."""
    manifest = {"chat": {"templates": {"default": TEMPLATE}, "tokens": {}}}
    chat = chats.read_format(manifest["chat"])
    assert chat is not None
    texts = [None if place in wrong else chat.render(messages) for place, messages in enumerate(chats.CHATS.values())]
    monkeypatch.setattr(chats, "PAGE", tmp_path)
    monkeypatch.setattr(chats, "_rendered", lambda *_: texts)
    monkeypatch.setattr(chats.shutil, "which", lambda name: name)
    chats.warn_of_chats(manifest)
    assert not caplog.records, "the page is not built"
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist/index.js").touch()
    chats.warn_of_chats(manifest)
    assert [record.args for record in caplog.records] == (
        [(", ".join([*chats.CHATS][i] for i in wrong),)] if wrong else []
    )
