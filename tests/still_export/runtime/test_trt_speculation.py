"""Calls of guessed tokens on TensorRT, over its stand-in: logits and states are those of plain decoding, whatever holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import still_export
from still_export.engines.build import build_engines
from still_export.graph.options import ExportOptions
from still_export.package.folder import open_package
from still_export.package.trust import trust_package
from still_export.proof.package import VerifyOptions, verify
from still_export.runtime.base import Runner
from still_export.runtime.ort import OrtModel
from still_export.runtime.sampling import RunError, Sampling
from still_export.runtime.snapshot import Snapshot
from still_export.runtime.speculation import Guesser, Speculation
from still_export.runtime.tensorrt import TrtModel
from still_export.targets.ort.options import OrtOptions
from still_export.targets.trt.options import TrtOptions
from still_graphs.states import AHEAD, ANY, LAST_HIDDEN, StateTable
from tests.still_export import fake_tensorrt
from tests.still_export.conftest import Exporter
from tests.still_export.fake_tensorrt import FakeTensorRT
from tests.still_export.head_models import published
from tests.still_export.linear_models import linear_model
from tests.still_export.packages import lower_package, portable_package
from tests.still_export.runtime.test_speculation import (
    CLOSE,
    GUESSES,
    PROMPT,
    SEQUENCES,
    begun,
    check_models,
    demand_refusals,
)
from tests.still_export.tiny import CHUNK, MIXED

pytestmark = pytest.mark.slow  # each exports a model

PREFILL = 16
VERSION = "8.6.1"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> FakeTensorRT:
    return fake_tensorrt.deploy(monkeypatch, VERSION)


def built(portable: Path, folder: Path, batch: int = SEQUENCES, to: str = "trt8") -> Path:
    """A package for TensorRT of a portable one, with its engine."""
    folder.mkdir()
    lower_package(open_package(portable), TrtOptions(batch=batch, prefill_tokens=PREFILL), folder, to)
    trust_package(folder)
    build_engines(open_package(folder))
    return folder


def still(export_tiny: Exporter, **changes: Any) -> Path:
    package = export_tiny(options={"speculate": GUESSES}, final="trt", **{"layer_types": MIXED} | changes)
    return package.path


def test_still_beside_softmax_layers(export_tiny: Exporter, module: FakeTensorRT, tmp_path: Path) -> None:
    path = built(still(export_tiny), tmp_path / "trt")
    entry = json.loads((path / "manifest.json").read_text())["engines"][0]
    assert entry["profiles"] == ["prefill", "decode", "decode rows", "guesses"]
    assert module.configs[-1].profiles[-1]["input_ids"] == ((1, 5), (SEQUENCES, 5), (SEQUENCES, 5))
    check_models(lambda plain=False: TrtModel(path))


def test_states_that_fold_where_they_are_full(export_tiny: Exporter, module: FakeTensorRT, tmp_path: Path) -> None:
    asked = {"overflow": "fold_oldest", "capacity_tokens": 3 * CHUNK, "layer_types": None}
    path = built(still(export_tiny, **asked), tmp_path / "trt")
    check_models(lambda plain=False: TrtModel(path))


def test_a_call_within_a_chunk_copies_and_reads_nothing_again(
    export_tiny: Exporter, module: FakeTensorRT, tmp_path: Path
) -> None:
    model = begun(TrtModel(built(still(export_tiny), tmp_path / "trt")))
    places = model.length % CHUNK
    assert places.tolist() == [1, 5, 7]
    calls = module.engines[-1].calls
    model.guess(PROMPT[:, :3], np.array([3, 3, 1]))
    model.accept(np.array([1, 2, 1]))
    before = len(calls)
    assert not model._saved and model.length.tolist() == [2, CHUNK + 7, 2 * CHUNK]
    model.guess(PROMPT[:, :2], np.array([2, 1, 2]))  # the last one begins a chunk
    model.accept(np.array([1, 1, 1]))
    assert calls[before:] == [1 + GUESSES] * 2 and set(model._saved) == {s.name for s in model.table if s.apart}
    model.guess(PROMPT[:, :2], np.array([2, 2, 2]))  # the second one does
    model.accept(np.array([2, 2, 2]))  # all hold: its states are those after the call
    assert calls[before:] == [1 + GUESSES] * 3


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen3_5_text", "mamba2", "moh_llama"])
def test_linear_families(family: str, module: FakeTensorRT, tmp_path: Path) -> None:
    linear_model(family).save_pretrained(tmp_path / "model")
    asked = ExportOptions(str(tmp_path / "model"), speculate=GUESSES)
    path = built(portable_package(asked, tmp_path / "portable", "trt").path, tmp_path / "trt")
    check_models(lambda plain=False: TrtModel(path))


class Always(Speculation):
    """Guesses at every step, of which one in three is another token."""

    def guess(self, guesser: Guesser, most: int, sequences: int = 1) -> list[int]:
        size = len(guesser.tokens)  # type: ignore[attr-defined]
        return [5 + (size + i) % 3 for i in range(min(most, size % (1 + self.most)))]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 3}], ids=["greedy", "sampled"])
def test_answers_are_those_of_plain_decoding(
    sampling: dict[str, Any], export_tiny: Exporter, module: FakeTensorRT, tmp_path: Path
) -> None:
    path = built(still(export_tiny), tmp_path / "trt", batch=1)
    plain = still_export.load(path, guess="none").runner
    guessing = still_export.load(path).runner
    assert isinstance(guessing, TrtModel) and guessing.guesses == GUESSES and plain.speculation is None
    guessing.speculation = Always(GUESSES)
    said = []
    for model in (plain, guessing):
        model.start()
        said.append(list(model.generate(PROMPT[0].tolist(), 40, Sampling(**sampling))))
    assert said[0] == said[1] and guessing.speculation.steps > 10


def test_verify_reads_guesses_and_sees_one_that_is_not_undone(
    export_tiny: Exporter, module: FakeTensorRT, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = built(still(export_tiny), tmp_path / "trt")
    options = VerifyOptions(lengths=(CHUNK + 1,), decode_steps=CHUNK + 3)
    report = verify(path, options, tmp_path).report
    assert report.passed and any(output.case.endswith("guessed") for output in report.outputs)
    monkeypatch.setattr(StateTable, "settled", ANY)
    report = verify(path, options, tmp_path).report
    failed = {output.case for output in report.outputs if not output.passed}
    assert failed and all(case.endswith("guessed") for case in failed)


def test_refusals(export_tiny: Exporter, module: FakeTensorRT, tmp_path: Path) -> None:
    path = built(still(export_tiny), tmp_path / "trt")
    model = begun(TrtModel(path))
    demand_refusals(model)
    before, model._saved = model.state_arrays(), {}
    limit, model.driver.limit = model.driver.limit, sum(len(block) for block in model.driver.blocks.values())
    with pytest.raises(RunError, match=r"out of device memory.*keep a copy.*--guess none"):
        model.guess(np.full((SEQUENCES, 5), 5))
    model.driver.limit = limit
    assert all(np.array_equal(array, before[name]) for name, array in model.state_arrays().items())


def test_a_head_is_left_out(module: FakeTensorRT, tmp_path: Path) -> None:
    """The package of a model that was published with one is that of the model alone; guesses are looked up."""
    published("qwen3_5_text").save(tmp_path / "model")
    asked = ExportOptions(str(tmp_path / "model"), speculate=GUESSES)
    portable = portable_package(asked, tmp_path / "portable", "trt")
    assert any(state["name"].startswith(AHEAD) for state in portable.manifest["states"])
    path = built(portable.path, tmp_path / "trt")
    graph = onnx.load(path / "model.onnx", load_external_data=False).graph
    names = {value.name for value in (*graph.input, *graph.output, *graph.initializer)}
    assert not any(AHEAD in name or name == LAST_HIDDEN for name in names)
    check_models(lambda plain=False: TrtModel(path))
    with pytest.raises(RunError, match=r"no head that guesses .* run it with ONNX Runtime"):
        still_export.load(path, guess="mtp")


def test_saved_states_move_between_runtimes(export_tiny: Exporter, module: FakeTensorRT, tmp_path: Path) -> None:
    """Of packages that were lowered from one portable package; those of others are refused."""
    portable = still(export_tiny)
    for name in ("onnx", "same"):
        (tmp_path / name).mkdir()
        lower_package(open_package(portable), OrtOptions(native=False), tmp_path / name, "onnx")
    other = still(export_tiny, layer_types=None)
    here: list[Runner] = [OrtModel(tmp_path / "onnx", threads=1), TrtModel(built(portable, tmp_path / "trt", 1))]
    tokens = PROMPT[:1, : CHUNK + 5]
    for one, another in (here, here[::-1], [here[0], OrtModel(tmp_path / "same", threads=1)]):
        one.start()
        one.feed(tokens)
        path = tmp_path / "state.safetensors"
        Snapshot.of(one).save(path)
        another.start()
        another.feed(tokens[:, :3])  # what it had read is forgotten
        Snapshot.load(path).restore(another, CHUNK)
        ends = [
            np.concatenate([model.feed(tokens[:, i : i + 1]) for i in range(CHUNK)], axis=1) for model in (one, another)
        ]
        np.testing.assert_allclose(ends[1], ends[0], atol=CLOSE["atol"], rtol=CLOSE["rtol"])
    (tmp_path / "other").mkdir()
    lower_package(open_package(other), OrtOptions(native=False), tmp_path / "other", "onnx")
    with pytest.raises(RunError, match="of another package"):
        Snapshot.load(path).restore(OrtModel(tmp_path / "other", threads=1))
