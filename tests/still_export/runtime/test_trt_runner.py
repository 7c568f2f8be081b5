"""The TensorRT runner over a stand-in for TensorRT and the driver."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from still_export.engines.build import build_engines
from still_export.evaluation.bench import BenchOptions, measure
from still_export.package.folder import Package, open_package
from still_export.package.refusals import CheckError
from still_export.proof.sessions import Session
from still_export.runtime.ort import OrtModel
from still_export.runtime.sampling import RunError, Sampling
from still_export.runtime.tensorrt import TrtError, TrtModel
from still_graphs.states import StateTable
from tests.still_export import fake_tensorrt
from tests.still_export.fake_tensorrt import FakeTensorRT
from tests.still_export.packages import onnx_package, trt_package
from tests.still_graphs.small_graph import VOCABULARY

PREFILL, BATCH = 16, 3


@pytest.fixture(params=["10.3.0"])
def module(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> FakeTensorRT:
    return fake_tensorrt.install(monkeypatch, request.param)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: FakeTensorRT) -> Package:
    """A package with an engine for prefill calls of 16 tokens and batches of 3."""
    package = trt_package(tmp_path / "trt", monkeypatch, "float32", batch=BATCH, prefill_tokens=PREFILL)
    build_engines(package)
    return open_package(package.path)


def change(package: Package, **values: Any) -> None:
    path = package.path / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.fixture
def reference(tmp_path: Path) -> OrtModel:
    package = onnx_package(tmp_path / "reference", "float32")
    model = OrtModel(package.path, threads=1)
    return model


def tokens(*shape: int) -> np.ndarray:
    return np.random.default_rng(3).integers(0, VOCABULARY, shape)


def assert_states(model: TrtModel, reference: OrtModel) -> None:
    got, wanted = model.state_arrays(), reference.state_arrays()
    for name, array in wanted.items():
        common = tuple(slice(0, min(pair)) for pair in zip(got[name].shape, array.shape, strict=True))
        np.testing.assert_allclose(got[name][common], array[common], atol=1e-5, err_msg=name)


def test_calls_in_place_equal_the_portable_model(package: Package, module: FakeTensorRT, reference: OrtModel) -> None:
    model = TrtModel(package.path)
    TrtModel(package.path)  # TensorRT refuses to load a library twice
    assert module.loaded == ["libstill_tensorrt10.so"]
    model.start(2)
    reference.start(2)
    allocated = None
    for size, counts in ((13, (13, 7)), (1, (1, 1)), (1, (1, 0)), (16, (3, 16)), (1, (1, 1))):
        ids = tokens(2, size)
        logits = model.feed(ids, np.array(counts))
        expected = reference.feed(ids, np.array(counts))
        for row, count in enumerate(counts):
            np.testing.assert_allclose(logits[row, :count], expected[row, :count], atol=1e-5)
        assert_states(model, reference)
        allocated = allocated or model._state["window_key.0"].address
        assert model._state["window_key.0"].address == allocated, "past and present stay one buffer"
    np.testing.assert_array_equal(model.length, reference.length)


def test_rows_are_called_and_forgotten_alone(package: Package, module: FakeTensorRT, reference: OrtModel) -> None:
    model = TrtModel(package.path)
    said = []
    for runner in (model, reference):
        runner.start(3)
        runner.feed(tokens(3, 13), np.array([13, 9, 4]))
        before = runner.state_arrays()
        runner.forget(1)
        assert any(array[1].any() for array in before.values())
        for name, array in runner.state_arrays().items():
            assert not array[1].any(), name
            np.testing.assert_array_equal(array[::2], before[name][::2])
        said.append([runner.feed(tokens(1, 30), first=1)[0, -1], runner.feed(tokens(2, 1), np.array([0, 1]))[1, -1]])
        assert runner.length.tolist() == [13, 31, 4]
    np.testing.assert_allclose(said[0], said[1], atol=1e-5)
    assert_states(model, reference)


def test_a_state_moves_to_another_row_and_runtime(package: Package, module: FakeTensorRT, reference: OrtModel) -> None:
    model = TrtModel(package.path)
    model.start(2)
    model.feed(tokens(2, 13), np.array([13, 9]))
    taken = {name: array.copy() for name, array in model.take(0).items()}
    reference.start(3)
    reference.feed(tokens(3, 20))
    for runner, row in ((model, 1), (reference, 2)):
        others = runner.state_arrays()
        runner.put(row, taken, 13)
        assert runner.length[row] == 13
        for name, array in runner.state_arrays().items():
            np.testing.assert_array_equal(array[:row], others[name][:row])
        for name, array in runner.take(row).items():
            np.testing.assert_array_equal(array, taken[name])
    said = [model.feed(tokens(1, 5), first=row)[0, -1] for row in (0, 1)]
    said.append(reference.feed(tokens(1, 5), first=2)[0, -1])
    np.testing.assert_allclose(said[1:], [said[0]] * 2, atol=1e-5)


def test_a_call_beyond_the_profile_is_fed_in_pieces(
    package: Package, module: FakeTensorRT, reference: OrtModel
) -> None:
    model = TrtModel(package.path)
    model.start(1)
    reference.start(1)
    ids = tokens(1, 2 * PREFILL + 5)
    np.testing.assert_allclose(model.feed(ids), reference.feed(ids), atol=1e-5)
    assert module.engines[-1].calls == [16, 16, 5]


def test_room_grows_without_losing_state(package: Package, module: FakeTensorRT, reference: OrtModel) -> None:
    model = TrtModel(package.path)
    model.start(2, tokens=20)
    reference.start(2, tokens=96)
    rows = model.table.rows(model.room)
    for size in (16, 16, 16, 16):
        ids = tokens(2, size)
        model.feed(ids)
        reference.feed(ids)
    assert model.table.rows(model.room)["slots"] > rows["slots"]
    assert_states(model, reference)
    with pytest.raises(RunError, match="97 tokens exceed this package's capacity of 96 tokens"):
        model.feed(tokens(2, 33))


def test_growing_states_end_at_the_capacity(package: Package, module: FakeTensorRT, monkeypatch: Any) -> None:
    """Of the engine, whatever other states do beyond it."""
    table = StateTable.of(package.manifest)
    table.bounded = False
    monkeypatch.setattr(StateTable, "of", lambda manifest: table)
    model = TrtModel(package.path)
    model.start(1)
    with pytest.raises(RunError, match="97 tokens exceed this package's capacity of 96 tokens"):
        model.reserve(97)


def test_greedy_replays_equal_single_steps(package: Package, module: FakeTensorRT, reference: OrtModel) -> None:
    prompt, count = tokens(20).tolist(), 40
    expected = list(reference_generate(reference, prompt, count))
    model = TrtModel(package.path)
    model.start()
    assert list(model.generate(prompt, count, Sampling())) == expected
    # one warm-up step of zero tokens, then a replay for each token but the first
    assert module.engines[-1].calls == [16, 4] + [1] * count
    model.start()
    sampled = list(model.generate(prompt, count, Sampling(temperature=1e-6)))
    assert sampled == expected, "sampling reads logits on the host and agrees where it is sure"
    stop = expected[10]
    model.start()
    assert list(model.generate(prompt, count, Sampling(), stop=[stop])) == expected[: expected.index(stop)]


def reference_generate(reference: OrtModel, prompt: list[int], count: int) -> list[int]:
    reference.start()
    return list(reference.generate(prompt, count, Sampling()))


def test_a_step_that_promotes_counts_once(package: Package, module: FakeTensorRT, reference: OrtModel) -> None:
    """The warm-up before a capture must not fold a chunk into the linear state."""
    model = TrtModel(package.path)
    model.start(1)
    reference.start(1)
    ids = tokens(1, 16)
    model.feed(ids)
    reference.feed(ids)  # the next token opens the third chunk and promotes the first
    token = np.array([4])
    step = next(model.greedy(token, 1))
    logits = reference.feed(token[None])
    assert step[0] == logits[0, -1].argmax()
    assert_states(model, reference)


def test_infer_takes_and_returns_states(package: Package, module: FakeTensorRT) -> None:
    model = TrtModel(package.path)
    session = Session(model)
    shapes = model.table.shapes(2, {"slots": 0})
    feed = {s.past: np.zeros(shapes[s.name], s.dtype) for s in model.table}
    counts = np.array([5, 2], np.int64)
    outputs = session.infer({**feed, "input_ids": tokens(2, 5), "new_tokens": counts, "past_length": counts * 0})
    assert outputs["logits"].shape == (2, 5, VOCABULARY) and outputs["present_salient_key.0"].shape[2] == 0
    again = {n.replace("present_", "past_"): x for n, x in outputs.items() if n.startswith("present_")}
    more = session.infer({**again, "input_ids": tokens(2, 3), "new_tokens": counts * 0 + 3})
    assert more["present_length"].tolist() == [8, 5]
    assert np.abs(more["present_window_key.0"]).sum() > np.abs(outputs["present_window_key.0"]).sum()


def test_what_does_not_fit_this_machine_is_said(
    package: Package, module: FakeTensorRT, monkeypatch: pytest.MonkeyPatch
) -> None:
    (entry,) = package.manifest["engines"]
    plan, library = package.path / "engine.plan", package.path / "libstill_tensorrt10.so"
    content = plan.read_bytes()

    def refused(match: str, plugin: Path | None = None, **changes: Any) -> None:
        module.creators.clear()
        change(package, engines=[entry | changes])
        with pytest.raises((TrtError, CheckError), match=match):
            TrtModel(package.path, plugin)

    refused(r"built by TensorRT 8\.6\.1, this is 10\.3\.0.*still-export build", tensorrt="8.6.1")
    refused(r"built for sm_80 .*this GPU is stand-in, sm_90.*still-export build", archs=["sm_80"])
    refused(r"engine\.plan has \d+ bytes, the manifest says 7: it is missing, truncated or replaced", size_bytes=7)
    refused(r"engines\[0\]\.file is 'gone\.plan', which files does not list", file="gone.plan")
    plan.write_bytes(content[::-1])
    refused(r"engine\.plan is not the file that was exported")
    plan.write_bytes(content)
    library.write_text(fake_tensorrt.library_text("2"))
    refused(r"libstill_tensorrt10\.so is not the file that was exported")
    refused(r"has version 2 of the plugin HybridAttention, the package needs version 1", library)
    library.write_text(fake_tensorrt.library_text()[1:])
    refused(r"cannot load .*libstill_tensorrt10\.so; it was built for another version", library)
    for other in ("", "a library, in whose code STILLAR1 stands"):
        library.write_text(other)
        refused(r"libstill_tensorrt10\.so is no plugin library of still-export\. Leave --plugin away, or name", library)
    library.unlink()
    refused(r"libstill_tensorrt10\.so is missing \(searched there only\)\. Name it with --plugin", library)
    change(package, plugins={"8": "libstill_tensorrt8.so"})
    refused(r"no plugin library for TensorRT 10\.3\.0, only for 8")
    change(package, engines=[])
    with pytest.raises(TrtError, match=r"has no engine yet\. Build it on this machine: still-export build"):
        TrtModel(package.path)
    monkeypatch.setitem(__import__("sys").modules, "tensorrt", None)
    refused("tensorrt is not installed")


def test_batches_and_memory_have_limits(package: Package, module: FakeTensorRT) -> None:
    model = TrtModel(package.path)
    with pytest.raises(TrtError, match=r"batch 4 is outside 1\.\.3 .*--batch 4"):
        model.start(4)
    model.driver.limit = 20_000  # three rows take 27 KB, one takes 9
    with pytest.raises(
        TrtError, match=r"out of device memory: .* are free.* 3 sequences for 96 tokens does not fit; \d+ tokens"
    ):
        model.start(3, tokens=96)


def test_memory_that_ends_while_the_state_grows_loses_nothing(
    package: Package, module: FakeTensorRT, reference: OrtModel
) -> None:
    model = TrtModel(package.path)
    model.start(1)
    reference.start(1)
    ids = tokens(1, 40)
    model.feed(ids[:, :30])
    reference.feed(ids[:, :30])
    limit, model.driver.limit = model.driver.limit, sum(len(b) for b in model.driver.blocks.values())
    with pytest.raises(TrtError, match="out of device memory"):
        model.reserve(60)
    model.driver.limit = limit
    assert_states(model, reference)
    np.testing.assert_allclose(model.feed(ids[:, 30:]), reference.feed(ids[:, 30:]), atol=1e-5)
    assert_states(model, reference)


def test_memory_of_others_is_not_the_engines(package: Package, module: FakeTensorRT) -> None:
    first = TrtModel(package.path)
    first.start(3, tokens=96)
    second = TrtModel(package.path)  # opened beside the first one's states
    assert second.peak_mb() < first.peak_mb()
    held = second.peak_mb()
    second.start(1, tokens=40)
    assert held < second.peak_mb() < first.peak_mb()


def test_bench_measures_the_packages_runtime(package: Package, module: FakeTensorRT) -> None:
    row = measure(package.path, 40, BenchOptions(steps=5, runtime="trt"))
    assert row.length == 40 and row.prefill_s > 0 and row.decode_ms > 0 and row.peak_mb > 0
    assert module.engines[-1].calls == [16] + 3 * (
        [16, 16, 8] + [1] * 7
    )  # warm-up; of each round prefill, warm-up and six replays
