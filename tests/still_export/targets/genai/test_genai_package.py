"""Packages for onnxruntime-genai: fed as genai feeds them by plain ONNX Runtime, by og.Model itself where it is installed, and refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from still_export.errors import ConfigError, UnsupportedError
from still_export.graph.options import ExportOptions
from still_export.package.folder import Package, open_package
from still_export.runtime.ort import OrtModel
from still_export.runtime.sampling import RunError, Sampling
from still_export.targets.export import export, plan_job
from still_export.targets.genai.package import CONFIG, GRAPH
from tests.still_export.linear_models import FAMILIES, linear_model
from tests.still_export.targets.ort.test_native import built
from tests.still_export.tiny import CHUNK, MIXED, VOCAB, still_model
from tests.still_export.training import byte_tokenizer
from tests.still_export.verbs import call
from tests.still_graphs.genai_host import GenaiHost

__all__ = ["built"]

CAPACITY = 96
FEW = ("qwen3_5_text", "kimi_linear", "lfm2", "falcon_h1", "mamba3")
"""States as they are beside a cache; three convolutions a layer; no matrix; both kinds in one layer; several joined in every layer."""
REFUSED = {
    "lfm3": "one size",
    "transnormer": "one size",
    **dict.fromkeys(("minicpm_sala", "recurrent_gemma"), "one size"),
    **dict.fromkeys(("rwkv5", "rwkv6", "rwkv7"), "one size"),
    "neural_attention_search_linear_attn_gdn": "one size",
    "routing_transformer": "one key and one value",
    "llama_with_landmark": "an extra token",
    "flux_qwen3": "a prompt in one call",
}
"""Families that genai cannot hold, and what the export says of them."""


def package(folder: Path, model: Any, *flags: str) -> Package:
    model.save_pretrained(folder / "model")
    out = folder / "package"
    assert (
        call(folder / "model", "--to", "genai", "--capacity-tokens", str(CAPACITY), *flags, "-o", out, "--quiet") == 0
    )
    return open_package(out)


def greedy(host: GenaiHost, prompt: np.ndarray, count: int) -> list[int]:
    found = [int(host.feed(prompt[None])[0, -1].argmax())]
    while len(found) < count:
        found.append(int(host.feed(np.array([[found[-1]]]))[0, -1].argmax()))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("knobs", [{"layer_types": MIXED}, {"overflow": "fold_oldest"}], ids=str)
def test_the_graph_of_genai_gives_the_tokens_of_run(knobs: dict[str, Any], tmp_path: Path) -> None:
    made = package(tmp_path, still_model("llama", torch.float32, **knobs))
    assert made.manifest["target"] == "genai" and {GRAPH, CONFIG} <= set(made.manifest["files"])
    config = json.loads((made.path / CONFIG).read_text())["model"]
    mixed = "layer_types" in knobs
    assert config["context_length"] == (CAPACITY if mixed else 1 << 20) and config["decoder"]["filename"] == GRAPH
    assert (config["decoder"]["num_key_value_heads"], config["decoder"]["head_size"]) == ((2, 10) if mixed else (1, 1))
    prompt = np.random.default_rng(0).integers(3, VOCAB, 2 * CHUNK + 3)
    own = OrtModel(made.path, threads=1)
    own.start()
    expected = list(own.generate(prompt.tolist(), 4 * CHUNK, Sampling()))
    assert greedy(GenaiHost(made.path / GRAPH, 1), prompt, 4 * CHUNK) == expected


@pytest.mark.slow
@pytest.mark.parametrize("family", [pytest.param(f, marks=() if f in FEW else pytest.mark.long) for f in FAMILIES])
def test_linear_families(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if family in REFUSED:
        monkeypatch.setattr("still_export.graph.lower.portable_graph", None)  # before anything is traced
        with pytest.raises(AssertionError):
            package(tmp_path, linear_model(family))
        assert REFUSED[family] in " ".join(capsys.readouterr().err.split())
        return
    made = package(tmp_path, linear_model(family))
    prompts = np.random.default_rng(1).integers(3, VOCAB, (2, 70))
    counts = np.array([70, 41])
    own, host = OrtModel(made.path, threads=1), GenaiHost(made.path / GRAPH, 2)
    own.start(2)
    np.testing.assert_allclose(host.feed(prompts, counts), own.feed(prompts, counts), atol=1e-4, rtol=1e-4)
    for token in np.random.default_rng(2).integers(3, VOCAB, (8, 2, 1)):
        np.testing.assert_allclose(host.feed(token), own.feed(token), atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "knobs, flags",
    [
        ({"layer_types": MIXED}, ()),
        ({"layer_types": MIXED}, ("--native",)),
        ({"select_scope": "kv_group_max"}, ("--native", "--cache", "float16")),
        ({"select_scope": "kv_group_max", "sizes": {"head_dim": 12}}, ("--native", "--cache", "int8")),
        ({"overflow": "fold_oldest", "sizes": {"head_dim": 12}}, ("--no-native", "--cache", "int8")),
        ({"overflow": "fold_oldest", "layer_types": MIXED}, ("--native", "--dtype", "float16")),
    ],
    ids=str,
)
def test_verify_drives_genai_itself(
    built: None, knobs: dict[str, Any], flags: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnxruntime_genai")
    made = package(tmp_path, still_model("llama", torch.float32, **knobs), *flags)
    code = call("verify", made.path, "--lengths", "1,9", "--decode-steps", "40", "--quiet")
    shown, refused = capsys.readouterr()
    assert code == 0, shown + refused
    assert shown.count("onnxruntime-genai") == 5 and "NO," not in shown


@pytest.mark.slow
def test_a_graph_that_computes_something_else_fails(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime_genai")
    from still_export.proof.genai import genai_checks

    made = package(tmp_path, still_model("llama", torch.float32))
    graph = onnx.load(made.path / GRAPH, load_external_data=False)
    (past,) = [n for n in graph.graph.node if "past_length" in n.output]
    past.op_type = "Add"  # every call begins somewhere else
    onnx.save(graph, made.path / GRAPH)
    checks = genai_checks(made, 20)
    assert [check.passed for check in checks] == [False, False, False, True, True], checks


@pytest.mark.slow
def test_native_code_that_nobody_vouched_for_is_not_loaded(
    built: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from still_export.package import trust
    from still_export.proof.genai import check_library

    made = package(tmp_path, still_model("llama", torch.float32), "--native")
    check_library(made)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "elsewhere"))  # another machine
    monkeypatch.setattr(trust, "_TRUSTED", set())
    with pytest.raises(RunError, match="onnxruntime-genai would load it"):
        check_library(made)


@pytest.mark.parametrize(
    "asked, said",
    [
        ({"native": True, "archs": ("sm_90",)}, "--arch: for --to onnx and trt and trt-rtx, not for --to genai"),
        ({"quantize": "int4", "adapters": True}, "--adapters: genai has no inputs"),
        ({"opset": 27}, "--opset: for --to onnx, not for --to genai"),
        ({"all_logits": True}, "--all-logits: genai reads the last token's"),
        ({"dtype": "bfloat16"}, "--dtype bfloat16: packages for genai run on the CPU"),
        ({"batch": 2}, "--batch: for --to trt and trt-rtx, not for --to genai"),
    ],
)
def test_what_genai_cannot_have_is_refused_at_once(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        plan_job("genai", {"model": "nowhere", **asked})
    assert said in str(error.value) and str(error.value).count(". ") == 0


@pytest.mark.slow
def test_softmax_layers_in_8_bits_are_refused_before_a_weight_is_read(tmp_path: Path) -> None:
    model = still_model("llama", torch.float32, layer_types=MIXED, sizes={"head_dim": 12})
    model.save_pretrained(tmp_path / "model")
    asked = ExportOptions(str(tmp_path / "model"), still={"cache": "int8"})
    with pytest.raises(UnsupportedError, match="--cache int8: genai stores no scales beside the keys"):
        export(asked, tmp_path / "package", to="genai")
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_a_capacity_without_rows_is_refused() -> None:
    """Where a state would have none, genai would take its dimension for an unknown one."""
    from still_export.targets.genai.package import PASSES
    from tests.still_graphs.passes import run_passes
    from tests.still_graphs.small_graph import small_graph

    model = small_graph()
    onnx.helper.set_model_props(model, {"still.capacity": '{"capacity_tokens": 0, "bounded": true}'})
    for info in model.graph.input:
        if "window" in info.name or "salient" in info.name:
            info.type.tensor_type.shape.dim[1].dim_value = 0
    with pytest.raises(UnsupportedError, match="have no row at this capacity"):
        run_passes(model, PASSES)


@pytest.mark.slow
def test_chats_that_genai_renders_otherwise_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its engine finds no text in a text."""
    pytest.importorskip("onnxruntime_genai")
    model = still_model("llama", torch.float32, sizes={"vocab_size": 257}, layer_types=MIXED)
    cut = "{{ m.content.split('</think>')[-1] if '</think>' in m.content else m.content }}"
    for name, content, said in (
        ("right", "{{ m.content }}", ""),
        ("wrong", cut, "right: an answer with its reasoning."),
    ):
        tokenizer = byte_tokenizer()
        tokenizer.chat_template = f"{{% for m in messages %}}[{{{{ m.role }}}}]{content}{{% endfor %}}"
        tokenizer.save_pretrained(tmp_path / name / "model")
        package(tmp_path / name, model)
        found = [r.getMessage() for r in caplog.records if r.name.endswith("genai.chats")]
        assert (said in found[0]) if said else not found
