"""build, run, verify and bench for TensorRT, end to end over the stand-ins; and a runner that is wrong must fail."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from still_export.evaluation.bench import BenchOptions, measure
from still_export.package.trust import trust_package
from still_export.proof.sessions import Session
from still_export.runtime.tensorrt import TrtModel
from still_export.targets.trt.options import TrtOptions
from tests.still_export import fake_tensorrt
from tests.still_export.conftest import Exporter
from tests.still_export.packages import lower_package
from tests.still_export.tiny import CHUNK
from tests.still_export.verbs import call

pytestmark = pytest.mark.slow

SIZES = ("--lengths", "1,8,33,40", "--decode-steps", "20")
"""A prompt longer than the profile, and steps beyond a chunk."""


@pytest.fixture(scope="module")
def package_of(tmp_path_factory: pytest.TempPathFactory, export_tiny: Exporter) -> Callable[..., Path]:
    """A package of the tiny model in a type, without an engine."""

    @cache
    def make(dtype: str, batch: int = 4, to: str = "trt8") -> Path:
        folder = tmp_path_factory.mktemp(dtype)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "still_export.targets.trt.package._write_plugins",
                lambda graph, target, *a: fake_tensorrt.write_libraries(target),
            )
            options = TrtOptions(batch=batch, prefill_tokens=4 * CHUNK)
            lower_package(export_tiny(dtype=dtype, final="trt"), options, folder, to)
        trust_package(folder)  # as an export does that compiles its plugins here
        return folder

    return make


@pytest.fixture(scope="module")
def answers(package_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """PyTorch's answers for the float16 package."""
    path = tmp_path_factory.mktemp("answers") / "calls.npz"
    assert call("verify", package_of("float16"), "--record", path, *SIZES, "--quiet") == 0
    return path


@pytest.fixture(scope="module")
def engine_of(package_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The package with an engine of a version of TensorRT."""

    @cache
    def make(dtype: str, version: str, *batch: int) -> Path:
        folder = tmp_path_factory.mktemp("engine") / "package"
        shutil.copytree(package_of(dtype, *(batch or (4,)), "trt8" if version.startswith("8") else "trt"), folder)
        with pytest.MonkeyPatch.context() as patch:
            fake_tensorrt.install(patch, version)
            patch.setattr("still_export.engines.build.has_gpu", lambda: True)
            assert call("build", folder, "--quiet") == 0
        return folder

    return make


@pytest.fixture
def built(engine_of: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: Any) -> Path:
    """A package with an engine of TensorRT 8.6 (float16), or of the parameter's type, version and batch."""
    dtype, version, *batch = getattr(request, "param", ("float16", "8.6.1"))
    engine = engine_of(dtype, version, *batch)
    fake_tensorrt.install(monkeypatch, version)
    return Path(shutil.copytree(engine, tmp_path / "package"))


def report(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "report.json").read_text())


def test_verify_passes(built: Path, answers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("verify", built, "--runtime", "trt", "--calls", answers, "--polygraphy", "--quiet") == 0, (
        capsys.readouterr().out
    )
    expect_all(built, capsys.readouterr().out)
    assert polygraphy(built, tmp_path) == 0


@pytest.mark.parametrize("built", [("float32", "10.3.0"), ("float16", "11.1.0")], indirect=True)
def test_verify_passes_beside_pytorch(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("verify", built, *SIZES, "--quiet") == 0, capsys.readouterr()
    expect_all(built, capsys.readouterr().out)


@pytest.mark.parametrize("built", [("float16", "8.6.1", 1)], indirect=True)
def test_verify_passes_with_heads_side_by_side(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads((built / "manifest.json").read_text())["trt"]["passes"]["merge_heads"] > 0
    assert call("verify", built, *SIZES, "--quiet") == 0, capsys.readouterr()
    shown = capsys.readouterr().out
    assert "PASSED" in shown and "ragged batch" not in shown


def expect_all(built: Path, shown: str) -> None:
    assert shown.startswith("PASSED")
    checks = {check["name"].partition(": ")[2] for check in report(built / "verify")["checks"] if check["passed"]}
    assert {f"{n} replayed steps of {rows} rows equal single steps" for n, rows in ((20, 1), (5, 2))} <= checks
    cases = " ".join(entry["case"] for entry in report(built / "verify")["outputs"])
    assert all(words in cases for words in ("prefill 40", "ragged batch", "prefill in pieces", "20 steps after 20"))
    names = {entry["output"].split(".")[0] for entry in report(built / "verify")["outputs"]}
    assert {"logits", "present_kv_state", "present_salient_key", "present_window_score", "present_length"} <= names


def polygraphy(package: Path, scratch: Path) -> int:
    """The printed command, with ONNX Runtime over the bodies in the place of the engine."""
    script = package / "verify/polygraphy.sh"
    text = script.read_text()
    engine = re.search(rf"{package}/engine.plan --model-type engine --trt --plugins (\S+)", text)
    assert engine is not None and engine[1].endswith("_static.so")
    model = onnx.load(package / "model.onnx")
    fake_tensorrt.restore_bodies(model)
    onnx.save(model, scratch / "bodies.onnx")
    script.write_text(text.replace(engine[0], f"{scratch / 'bodies.onnx'} --onnxrt"))
    done = subprocess.run(["sh", script], capture_output=True, text=True)
    assert "Pass Rate" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
    return done.returncode


def test_what_pytorch_computes_in_float32_stays_in_float32(package_of: Callable[..., Path]) -> None:
    """Norms, rotary angles and the logits; TensorRT 8.6 is held to these types, and 11 has no others. Products sum in it by themselves."""
    package = package_of("float16")
    types = json.loads((package / "manifest.json").read_text())["value_types"]
    found: dict[str, set[str]] = {}
    for node in onnx.load(package / "model.onnx", load_external_data=False).graph.node:
        found.setdefault(node.op_type, set()).add(types.get(node.output[0], "integer"))
    assert all(found[op] == {"float32"} for op in ("ReduceMean", "Sqrt", "Div", "Cos", "Sin")), found
    assert found["DenseMatMul"] == {"float16"} and types["logits"] == "float32"


def test_run_and_bench(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("run", built, "--runtime", "trt", "--prompt-ids", ",".join(["5"] * 70), "--tokens", 4, "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["tokens"]) == 4
    row = measure(built, 40, BenchOptions(steps=3, batch=2, runtime="trt"))
    assert (row.length, row.batch) == (40, 2) and row.decode_ms > 0


def test_answers_travel_to_a_machine_without_pytorch(
    built: Path, answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = answers
    absent = ("torch", "transformers", "onnx")
    for name, module in list(sys.modules.items()):
        # What of this package was imported with them here could not be imported there.
        needs = name.startswith("still_export.") and any(word in vars(module) for word in ("torch", "Tensor"))
        if name.split(".")[0] in absent or needs:
            monkeypatch.setitem(sys.modules, name, None)
    assert call("verify", built, "--calls", calls, "--decode-steps", 20, "--json", "--quiet") == 0
    found = report(built / "verify")
    assert found["passed"] and found["selections"]["compared"] > 0
    assert sum("replayed steps" in check["name"] for check in found["checks"]) == 3
    assert call("verify", built, "--selections", tmp_path / "chosen.npz", *SIZES, "--quiet") == 0

    def refused(*arguments: object, words: str) -> None:
        capsys.readouterr()
        assert call("verify", built, *arguments, "--quiet") == 2
        assert words in capsys.readouterr().err.replace("\n", " ")

    refused("--calls", calls, "--record", calls, words="give one of them")
    manifest = json.loads((built / "manifest.json").read_text())
    manifest["files"]["model.onnx.data"]["sha256"] = "0" * 64
    (built / "manifest.json").write_text(json.dumps(manifest))
    refused("--calls", calls, words="is not the file that was exported")


def test_answers_follow_an_engine_of_another_machine(
    built: Path,
    package_of: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PyTorch answers the package without its engine, in the prompts that this was asked, though it reads other words in the tokenizer."""
    chosen, calls = tmp_path / "chosen.npz", tmp_path / "calls.npz"
    assert call("verify", package_of("float16"), "--selections", chosen, "--quiet") == 2
    assert "has no engine yet" in capsys.readouterr().err
    with monkeypatch.context() as there:
        there.setattr("still_export.proof.package.prompt_words", lambda *given: (5, 7, 9))
        assert call("verify", built, "--selections", chosen, *SIZES, "--quiet") == 0
    assert call("verify", package_of("float16"), "--record", calls, "--follow", chosen, "--quiet") == 0
    assert call("verify", built, "--calls", calls, "--decode-steps", 20, "--quiet") == 0
    assert call("verify", package_of("float16", 1), "--record", calls, "--follow", chosen, "--quiet") == 2
    assert "in other prompts than those of this package" in capsys.readouterr().err.replace("\n", " ")


def broken(built: Path, answers: Path) -> dict[str, Any]:
    assert call("verify", built, "--calls", answers, "--quiet") == 1
    found = report(built / "verify")
    assert not found["passed"]
    return found


def failed(found: dict[str, Any]) -> set[str]:
    return {f"{o['case']}: {o['output']}" for o in found["outputs"] if not o["passed"]}


def test_a_wrong_state_row_fails(built: Path, answers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = TrtModel.state_arrays

    def swapped(model: TrtModel) -> dict[str, np.ndarray]:
        states = right(model)
        if model.batch > 1:
            states["window_value.1"][[0, -1]] = states["window_value.1"][[-1, 0]]
        return states

    monkeypatch.setattr(TrtModel, "state_arrays", swapped)
    found = broken(built, answers)
    wrong = failed(found)
    # States that were kept and go on carry the wrong row into others.
    assert {n.partition(": ")[2] for n in wrong if "restored" not in n} == {"present_window_value.1"}
    assert any("ragged batch" in name for name in wrong) and any("steps after" in name for name in wrong)
    assert found["first_diverging_layer"] == 1


def test_a_stale_graph_fails(built: Path, answers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured step that is kept although the state moved writes to the old place."""
    right, kept = TrtModel._resize, []

    def resize(model: TrtModel, tokens: int) -> None:
        grows, graphs = bool(model._state), getattr(model, "_graphs", {})
        kept.extend(model._state.values())  # what a GPU would do with freed memory is undefined
        right(model, tokens)
        if grows:
            model._graphs = graphs

    monkeypatch.setattr(TrtModel, "_resize", resize)
    found = broken(built, answers)
    assert not failed(found) and not all(check["passed"] for check in found["checks"])


def test_a_missing_piece_fails(built: Path, answers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its states and selections: what is behind a selection that no rounding explains, logits too, is not compared with a file."""
    right = TrtModel._call

    def forget(model: TrtModel, ids: np.ndarray, counts: np.ndarray) -> np.ndarray:
        logits = right(model, ids, counts)
        if ids.shape[1] == 4 * CHUNK:  # the rest of the prompt starts over
            model.length = model.length * 0
        return logits

    monkeypatch.setattr(TrtModel, "_call", forget)
    found = broken(built, answers)
    assert {f"prefill {n}: present_length" for n in (33, 40)} <= failed(found)
    assert found["selections"]["wrong"] > 0


def test_a_state_that_is_not_carried_fails(built: Path, answers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Session.step

    def step(session: Session, tokens: Any) -> Any:
        session.model.length = session.model.length + 1
        return right(session, tokens)

    monkeypatch.setattr(Session, "step", step)
    assert any("steps after" in name for name in failed(broken(built, answers)))


@pytest.mark.parametrize("fault", ["state", "selection", "logits"])
def test_what_goes_wrong_along_the_steps_fails(
    built: Path, answers: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Between two selections, in a single row: one head's values, one salient token that scores do not explain, one step's logits."""
    planted: list[int] = []

    def step(session: Session, tokens: Any) -> Any:
        model, logits = session.model, []
        for token in tokens:
            length = int(model.length[0])
            logits.append(model.feed(token) * (1.1 if fault == "logits" and length == 3 * CHUNK + 2 else 1.0))
            if fault != "logits" and length == 3 * CHUNK and model.batch == 1:
                states = model.state_arrays()
                if fault == "state":
                    states["window_value.1"][0, 1] *= -1
                for name in ("salient_key.1", "salient_value.1") if fault == "selection" else ():
                    states[name][0, 0, -1] = states[name][0, 0, 0]
                model._write_states(states)
                planted.append(length)
        return session._outputs(np.concatenate(logits, axis=1))

    monkeypatch.setattr(Session, "step", step)
    found = broken(built, answers)
    if fault == "selection":
        assert found["selections"]["wrong"] > 0
    else:
        wanted = "logits" if fault == "logits" else "present_window_value.1"
        assert f"20 steps after 20: {wanted}" in failed(found)
