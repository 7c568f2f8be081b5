"""Others' packages: what is right passes, every planted fault fails, what cannot be read is refused in a sentence."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from transformers import LlamaConfig

from still_export.cli.main import main
from still_export.errors import ConfigError, PackageError, UnsupportedError
from still_export.proof import foreign
from still_export.proof.foreign import ForeignProof, ForeignReport
from still_export.runtime.foreign import PAIRS, shared_name

VOCABULARY, SIZE = 29, 6
EMBEDDING, HEAD = (np.random.default_rng(i).normal(size=(VOCABULARY, SIZE)) for i in range(2))


class Sums:
    """The model: logits are the embeddings' running sum times the head."""

    def __init__(self, model: str, half: bool) -> None: ...

    def run(self, rows: np.ndarray, exact: bool) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        kind = np.float64 if exact else np.float32
        sums = EMBEDDING.astype(kind)[rows].cumsum(1)
        return (sums @ HEAD.astype(kind).T).astype(np.float64), {}


def graph(path: Path, fault: str = "", mask: bool = True) -> Path:
    """The same as a decoder with a state, and what is wrong in it."""
    weights = {"embedding": EMBEDDING, "head": HEAD.T * (1.0001 if fault == "weight" else 1)}
    constants = {"one": [1], "two": [2], "last": [-1], "end": [np.iinfo(np.int64).max], "zero": 0}
    nodes = [
        ("Gather", ["embedding", "input_ids"], ["embedded"], {}),
        ("Shape", ["input_ids"], ["shape"], {}),
        ("Slice", ["shape", "one", "two"], ["tokens"], {}),
        ("Neg", ["tokens"], ["begin"], {}),
    ]
    if mask:
        nodes += [
            ("Slice", ["attention_mask", "begin", "end", "one"], ["some"], {}),
            ("Unsqueeze", ["some", "two"], ["column"], {}),
            ("Cast", ["column"], ["real"], {"to": TensorProto.FLOAT}),
        ]
    read = mask and fault != "padding"
    nodes.append(("Mul", ["embedded", "real"], ["kept"], {}) if read else ("Identity", ["embedded"], ["kept"], {}))
    past = {"state": "none", "rows": "turned"}.get(fault, "past_state.0.sum")
    nodes += [
        ("CumSum", ["kept", "axis"], ["sums"], {}),
        ("Mul", ["past_state.0.sum", "nothing"], ["none"], {}),
        ("ReduceMax", ["past_state.0.sum", "rows"], ["turned"], {"keepdims": 1}),
        ("Unsqueeze", [past, "one"], ["before"], {}),
        ("Add", ["sums", "before"], ["all"], {}),
        ("MatMul", ["all", "head"], ["logits"], {}),
        ("Slice", ["all", "last", "end", "one"], ["ended"], {}),
        ("Squeeze", ["ended", "one"], ["present_state.0.sum"], {}),
    ]
    values = {name: np.array(x, np.int64) for name, x in {**constants, "axis": 1, "rows": [0]}.items()}
    values |= {name: x.astype(np.float32) for name, x in weights.items()} | {"nothing": np.float32(0).reshape(1)}
    long, real = TensorProto.INT64, TensorProto.FLOAT
    inputs = [("input_ids", long, ["B", "T"]), ("past_state.0.sum", real, ["B", SIZE])]
    inputs += [("attention_mask", long, ["B", "all"])] if mask else []
    outputs = [("logits", real, ["B", "T", VOCABULARY]), ("present_state.0.sum", real, ["B", SIZE])]
    if fault == "stateless":
        inputs, outputs = [inputs[0]], outputs[:1]
        nodes = [nodes[0], ("MatMul", ["embedded", "head"], ["logits"], {})]
    if fault == "type":
        inputs.append(("past_state.1.sum", TensorProto.BFLOAT16, ["B", SIZE]))
    if fault == "unknown":
        inputs.append(("image", real, ["B"]))
    made = helper.make_graph(
        [helper.make_node(op, given, to, **more) for op, given, to, more in nodes],
        "decoder",
        [helper.make_tensor_value_info(*i) for i in inputs],
        [helper.make_tensor_value_info(*o) for o in outputs],
        [numpy_helper.from_array(x, name) for name, x in values.items()],
    )
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return path


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(foreign, "Reference", Sums)
    LlamaConfig(vocab_size=VOCABULARY, hidden_size=SIZE, num_attention_heads=1).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def proven(path: Path, model: str, **more: Any) -> ForeignReport:
    return ForeignProof(path, model, **more).run()


def test_what_is_right_passes_whatever_the_split(tmp_path: Path, model: str) -> None:
    for mask in (True, False):
        report = proven(graph(tmp_path / "model.onnx", mask=mask), model)
        assert report.passed, [c for c in report.checks if not c.passed]
        assert {"two rows", "24 steps behind 107, batch 2"} <= {check.name for check in report.checks}
        assert ("padding: there is no attention_mask" in report.unseen) == (not mask)
        assert any(check.name.startswith("padding") for check in report.checks) == mask
        assert any("1 states by themselves (state.0.sum)" in line for line in report.unseen)


@pytest.mark.parametrize(
    "fault, found",
    [
        ("weight", "a prompt of 131"),
        ("state", "in pieces of 1, 130"),
        ("rows", "24 steps behind 107, batch 2"),
        ("padding", "padding on the left"),
    ],
)
def test_planted_faults_fail(fault: str, found: str, tmp_path: Path, model: str) -> None:
    """`rows`: the state is the largest of all rows, which one row alone does not show."""
    report = proven(graph(tmp_path / "model.onnx", fault), model)
    failed = [check.name for check in report.checks if not check.passed]
    assert not report.passed and found in failed
    if fault == "rows":
        assert failed == ["24 steps behind 107, batch 2", "padding on the left", "padding on the right"]


@pytest.mark.parametrize("pair", PAIRS)
def test_one_graph_for_prompts_and_one_for_steps(pair: tuple[str, str], tmp_path: Path, model: str) -> None:
    for name in pair:
        graph(tmp_path / name, mask=False)
    assert proven(tmp_path, model).passed
    graph(tmp_path / pair[1], "state", mask=False)
    assert not proven(tmp_path, model).passed


def test_the_verb(tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    good = graph(tmp_path / "model.onnx")
    other = tmp_path / "other"
    LlamaConfig(vocab_size=VOCABULARY + 1, hidden_size=SIZE, num_attention_heads=1).save_pretrained(other)
    for command, code, said in (
        ([good, "--model", model], 0, "PASSED"),
        ([graph(tmp_path / "stateless.onnx", "stateless"), "--model", model], 2, "has no past and present states"),
        ([good, "--model", other], 2, "gives logits of 29 tokens, the model 30"),
        ([good], 2, "name its model with --model"),
        ([tmp_path / "nowhere", "--model", model], 2, "nowhere does not exist. verify needs a package."),
        ([good, "--model", model, "--decode-steps", "3"], 2, "--decode-steps: not with a decoder of another exporter"),
    ):
        with pytest.raises(SystemExit) as left:
            main(["verify", *map(str, command)])
        shown = capsys.readouterr()
        assert left.value.code == code and said in " ".join((shown.out + shown.err).split())
    graph(tmp_path / "model.onnx", "state")
    ci = tmp_path / "ci" / "junit.xml"
    with pytest.raises(SystemExit, match=r"^1$"):
        main(["verify", str(tmp_path), "--model", model, "--lengths", "20", "--json", "-q", "--junit", str(ci)])
    found = json.loads(capsys.readouterr().out)
    root = ElementTree.parse(ci).getroot()
    assert int(root.get("failures", "0")) == sum(not check["passed"] for check in found["checks"]) > 0
    assert [each.get("message") for each in root.iter("skipped")] == found["unseen"] != []
    assert not found["passed"] and json.loads((tmp_path / "verify/report.json").read_text()) == found


def test_names_of_exporters() -> None:
    pairs = {
        "past_key_values.3.key": "present.3.key",
        "input.past_key_values.layers.0.keys": "output.past_key_values.layers.0.keys",
        "past_conv.1": "present_conv.1",
        "past_recurrent_state.2": "present_recurrent_state.2",
    }
    assert all(shared_name(past) == shared_name(present) for past, present in pairs.items())
    assert shared_name("past.1.key") != shared_name("past.1.value")


def test_refusals(tmp_path: Path, model: str) -> None:
    def refused(
        error: type[Exception], words: str, path: Path = tmp_path / "a.onnx", of: str = model, **more: Any
    ) -> None:
        with pytest.raises(error, match=words):
            proven(path, of, **more)

    refused(PackageError, "has no ONNX graph: name the decoder's file", tmp_path / "model")
    for fault, words in (
        ("stateless", "has no past and present states"),
        ("unknown", "neither input_ids, .* nor a past with its present: image"),
        ("type", r"a type that NumPy has not: past_state\.1\.sum \(tensor\(bfloat16\)\)"),
    ):
        refused(UnsupportedError, words, graph(tmp_path / "a.onnx", fault))
    (tmp_path / "a.onnx").write_bytes(b"no graph")
    refused(PackageError, r"a\.onnx: ONNX Runtime cannot read it")
    graph(tmp_path / "a.onnx")
    refused(ConfigError, "--model .*nowhere: transformers cannot read it", of=str(tmp_path / "nowhere"))
    refused(ConfigError, "--lengths 99999: the model has 2048 positions", lengths=(99999,))
    for content in ("[", "{}", json.dumps({"model": {"decoder": 3}})):
        (tmp_path / "genai_config.json").write_text(content)
        refused(PackageError, "does not say what the decoder is", tmp_path)
