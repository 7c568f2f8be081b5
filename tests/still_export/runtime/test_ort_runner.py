"""The ONNX Runtime runner, which is also the package's run_ort.py."""

from __future__ import annotations

import subprocess
import sys
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from still_export.loading.runtimes import open_runner
from still_export.models.load import load_model
from still_export.runtime.conversation import Conversation
from still_export.runtime.ort import OrtModel
from still_export.runtime.ort_session import MOST_THREADS, default_threads
from still_export.runtime.program import talk
from still_export.runtime.reasoning import Reasoning
from still_export.runtime.sampling import RunError, Sampling
from still_kernels.greedy_token.fuse import add_greedy_node
from tests.still_export.conftest import Exporter
from tests.still_export.tiny import CHUNK, MIXED, VOCAB
from tests.still_graphs.passes import applied, attach_functions
from tests.tolerances import MODEL

pytestmark = pytest.mark.slow  # each exports a model

PROMPT = np.random.default_rng(3).integers(3, VOCAB, 61)


def started(export_tiny: Exporter, **still: object) -> OrtModel:
    model = OrtModel(export_tiny(**still).path, threads=1)
    model.start()
    return model


@pytest.mark.parametrize(
    ("value", "threads"), [("3", 3), ("2,1", 2), ("", 0), ("many", 0), ("-1", 0), ("100000", MOST_THREADS)]
)
def test_the_environment_says_how_many_threads(value: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert default_threads() == threads


def greedy(model: OrtModel, count: int) -> list[int]:
    return list(model.generate(PROMPT, count, Sampling()))


@pytest.mark.parametrize(
    "still",
    [
        {},
        dict(layer_types=("hybrid_attention", "full_attention", "hybrid_attention")),
        dict(salient_by_layer=(1, 5, 0)),
    ],
    ids=str,
)
def test_generates_as_transformers(export_tiny: Exporter, still: dict) -> None:
    """Prefill in pieces, growing caches, in-place state, promotions during decode: same tokens as generate()."""
    model = started(export_tiny, **still)
    model.manifest["prefill_tokens"] = 2 * CHUNK + 3
    reference = load_model(model.manifest["config"]["model"])
    expected = reference.generate(torch.tensor(PROMPT)[None], max_new_tokens=40, do_sample=False)[0, len(PROMPT) :]
    assert greedy(model, 40) == expected.tolist()


def test_pieces_and_starts_do_not_matter(export_tiny: Exporter) -> None:
    model = started(export_tiny)
    whole = model.prefill(PROMPT)
    states = model.state_arrays()
    for pieces in (1, 7, CHUNK, 25):
        model.start()
        model.manifest["prefill_tokens"] = pieces
        np.testing.assert_allclose(model.prefill(PROMPT), whole, atol=MODEL["float32"], rtol=MODEL["float32"])
        for name, array in model.state_arrays().items():
            rows = states[name].shape[2:3] if "salient" in name else ()
            array = array[:, :, : rows[0]] if rows else array
            np.testing.assert_allclose(
                array, states[name][:, :, : array.shape[2]], atol=MODEL["float32"], rtol=MODEL["float32"]
            )


def test_an_output_of_the_graph_can_be_watched(export_tiny: Exporter) -> None:
    package = export_tiny()
    tensors = ("logits", "present_length")
    model: Any = open_runner(package.path, package.manifest, "ort", "cpu", check=False, tensors=tensors)
    model.start()
    logits = model.feed(np.array([[3, 4, 5]]))
    _, _, (seen, length) = model.seen[-1]
    assert np.array_equal(seen[:, -1].ravel(), logits.ravel()[-VOCAB:]) and length.tolist() == [3]


def test_capacity_is_refused_before_anything_runs(export_tiny: Exporter) -> None:
    model = OrtModel(export_tiny(capacity_tokens=40).path, threads=1)
    model.start()
    with pytest.raises(RunError, match="capacity of 40 tokens"):
        model.prefill(PROMPT)
    assert model.length[0] == 0
    model.prefill(PROMPT[:40])


def test_answer_beyond_the_capacity_is_refused_before_anything_runs(export_tiny: Exporter) -> None:
    """Not after the part that fits was printed; the last token need not fit, as nothing follows it."""
    model = OrtModel(export_tiny(capacity_tokens=40).path, threads=1)
    model.start()
    with pytest.raises(RunError, match="41 tokens exceed"):
        next(model.generate(PROMPT[:30], 12, Sampling()))
    assert model.length[0] == 0
    assert len(list(model.generate(PROMPT[:30], 11, Sampling()))) == 11


def test_chat_feeds_the_whole_of_an_answer_that_was_cut_off(
    export_tiny: Exporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state is that of one prompt of everything said."""
    model, answers = started(export_tiny), []

    class Talk:
        marks: ClassVar[dict[int, str]] = {}

        def opening(self, text: str, system: str | None = None, arguments: object = None) -> list[int]:
            return []

        def dialogue(self, messages: list[dict[str, str]], arguments: object = None) -> list[int]:
            return [int(x) for message in messages for x in message["content"].split()]

        def reasoning(self, prompt: list[int]) -> Reasoning:
            return Reasoning(None, False)

        def stream(self, tokens: Iterable[int], marks: object = None) -> Iterator[str]:
            answers.append([])
            for token in tokens:
                answers[-1].append(token)
                yield f"{token} "

    said = iter(["5 6 7", "8 9"])
    monkeypatch.setattr("builtins.input", lambda _: next(said, None) or (_ for _ in ()).throw(EOFError))
    talk(Conversation(model, Talk(), 4, Sampling()))  # type: ignore[arg-type]
    expected = [5, 6, 7, *answers[0], 8, 9, *answers[2][:-1]]
    assert model.length[0] == len(expected)
    states = model.state_arrays()
    model.start()
    model.prefill(expected)
    for name, array in model.state_arrays().items():  # the chat's may have more room
        np.testing.assert_allclose(
            states[name][:, :, : array.shape[2]], array, atol=MODEL["float32"], rtol=MODEL["float32"]
        )


def test_bad_requests(export_tiny: Exporter) -> None:
    model = started(export_tiny)
    with pytest.raises(RunError, match="no tokens"):
        model.prefill([])
    with pytest.raises(RunError, match="outside the vocabulary"):
        model.prefill([1, VOCAB])
    with pytest.raises(RunError, match="top_p"):
        Sampling(top_p=1.5)
    with pytest.raises(RunError, match="no manifest"):
        OrtModel(Path("/"))


def test_state_of_the_wrong_shape_is_refused(export_tiny: Exporter) -> None:
    model = started(export_tiny)
    arrays = model.state_arrays()
    with pytest.raises(RunError, match=r"window_key.0.*expected"):
        model.load({**arrays, "window_key.0": arrays["window_key.0"][..., :-1]}, np.zeros(1, np.int64))
    with pytest.raises(RunError, match=r"kv_state.1.*float32"):
        model.load({**arrays, "kv_state.1": arrays["kv_state.1"].astype(np.float64)}, np.zeros(1, np.int64))
    with pytest.raises(RunError, match=r"z_state.2.*missing"):
        model.load({k: v for k, v in arrays.items() if k != "z_state.2"}, np.zeros(1, np.int64))


def test_saved_state_continues(export_tiny: Exporter) -> None:
    model = started(export_tiny)
    model.prefill(PROMPT[:50])
    saved, length = model.state_arrays(), model.length.copy()
    expected = model.prefill(PROMPT[50:])
    model.start()
    model.load(saved, length)
    np.testing.assert_array_equal(model.prefill(PROMPT[50:]), expected)


class TestSampling:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05]))

    @pytest.mark.parametrize("top_k, top_p", [(0, 0.3), (0, 0.9), (0, 0.999999), (7, 1.0), (40, 0.8), (1000, 0.5)])
    def test_draws_as_a_sorted_vocabulary(self, top_k: int, top_p: float) -> None:
        """Parts of the vocabulary give what all of it gives, ties in the order of their ids."""
        random = np.random.default_rng(0)
        for scale in (0.1, 1.0, 8.0):
            logits = (random.normal(size=900) * scale).round(1).astype(np.float32)
            order = np.argsort(-logits, kind="stable")[: top_k or None]
            weight = np.exp(logits[order].astype(np.float64) - logits.max())
            kept = np.cumsum(weight) - weight < top_p * weight.sum()
            order, mass = order[kept], np.cumsum(weight[kept])
            sampling, draws = Sampling(1.0, top_k, top_p, seed=3), np.random.default_rng(3).random(50)
            expected = [order[np.searchsorted(mass / mass[-1], draw, side="right")] for draw in draws]
            assert [sampling.choose(logits) for _ in draws] == expected

    @pytest.mark.parametrize("temperature", [5e-324, 1e-9, 1e300])
    def test_no_temperature_is_too_small_or_too_large(self, temperature: float) -> None:
        drawn = {Sampling(temperature, seed=s).choose(self.logits.astype(np.float32)) for s in range(40)}
        assert drawn == ({0, 1, 2, 3} if temperature > 1 else {0})

    def test_seed_repeats(self) -> None:
        draws = [[s.choose(self.logits) for _ in range(20)] for s in (Sampling(1.0, seed=5), Sampling(1.0, seed=5))]
        assert draws[0] == draws[1]


def test_stand_alone_script(export_tiny: Exporter) -> None:
    """run_ort.py in the package, with nothing of ours to import."""
    package = export_tiny()
    ids = ",".join(map(str, PROMPT))
    script = package.path / "run_ort.py"
    program = (
        "import runpy, sys; sys.modules.update(dict.fromkeys(['torch', 'still_export', 'onnx', 'transformers'])); "
        f"sys.path.insert(0, {str(script.parent)!r}); "
        f"sys.argv = ['run_ort.py', '--prompt-ids', '{ids}', '--tokens', '12']; "
        f"sys.path[0] = {str(package.path)!r}; runpy.run_path({str(script)!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    model = started(export_tiny)
    assert [int(x) for x in done.stdout.split()] == greedy(model, 12)
    for bad, message in (("1,99", "outside the vocabulary"), ("1,x", "--prompt-ids")):
        failed = subprocess.run([sys.executable, "-c", program.replace(ids, bad)], capture_output=True, text=True)
        assert failed.returncode == 2 and message in failed.stderr and "Traceback" not in failed.stderr


def test_a_device_that_copies_inputs_when_they_are_bound(
    export_tiny: Exporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ONNX Runtime's CUDA provider copies a host array when it is bound: what is written into it later is not seen."""
    expected = greedy(started(export_tiny), 12)
    model = OrtModel(export_tiny().path, threads=1)
    real = model.values.kind

    class DeviceValue:
        """OrtValue of a device whose memory is here."""

        ortvalue_from_numpy_with_onnx_type = real.ortvalue_from_numpy_with_onnx_type

        @staticmethod
        def ortvalue_from_numpy(array: np.ndarray, device: str = "cpu", index: int = 0) -> object:
            assert device == "cuda", "bound from the host"
            return real.ortvalue_from_numpy(array.copy())

    class Copying:
        """A binding that copies host arrays when it gets them."""

        def __init__(self, binding: Any) -> None:
            self._binding = binding

        def __getattr__(self, name: str) -> Any:
            return getattr(self._binding, name)

        def bind_cpu_input(self, name: str, array: np.ndarray) -> None:
            self._binding.bind_cpu_input(name, array.copy())

    make = model.session.io_binding
    run = model.session.run_with_iobinding
    monkeypatch.setattr(model.session, "io_binding", lambda: Copying(make()))
    monkeypatch.setattr(model.session, "run_with_iobinding", lambda binding, options: run(binding._binding))
    monkeypatch.setattr(model.values, "kind", DeviceValue)
    monkeypatch.setattr(model.values, "device", "cuda")
    model.start()
    assert greedy(model, 12) == expected


def test_a_graph_that_says_the_token_keeps_logits_where_they_are(
    export_tiny: Exporter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Replayed steps read the token alone; a step that is asked for logits gives them."""
    package = export_tiny()
    model = OrtModel(package.path, threads=1)
    model.start()
    expected = greedy(model, 12)
    graph = onnx.load(package.model_path)
    applied(add_greedy_node, graph)
    attach_functions(graph)
    onnx.save(graph, tmp_path / "model.onnx")
    model.session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    monkeypatch.setattr(model.captures, "options", lambda graph=0: None)  # which the CPU provider has none of
    model.replays = model.returns_token = True
    model.start()
    first = int(model.prefill(PROMPT).argmax())
    steps = model.greedy(np.array([first]), 9)
    taken = [first, int(next(steps)[0])]
    with monkeypatch.context() as patch:
        patch.setattr(model.values, "floats", None)
        taken += [int(token[0]) for token in steps]
    assert taken == expected[:10]
    ids = np.array([taken[-1:]])
    before, length = model.state_arrays(), model.length
    (alone,) = model.feed_greedy(ids)
    assert alone.dtype == np.int32 and alone.tolist() == [expected[10]]
    model.load(before, length, 1)
    logits = model.step(ids[0])
    assert logits.shape[-1] == model.manifest["model"]["vocab_size"] and int(logits.argmax()) == expected[10]


@pytest.mark.slow
@pytest.mark.parametrize("in_place", [True, False])
def test_calls_on_some_rows_leave_the_others(
    export_tiny: Exporter, monkeypatch: pytest.MonkeyPatch, in_place: bool
) -> None:
    """Rows come, go on and go at different times; each says what it says alone, to the last token of the capacity."""
    model = OrtModel(export_tiny(layer_types=MIXED, capacity_tokens=64).path, threads=1)
    monkeypatch.setattr(model.states, "in_place", lambda state: in_place)
    rows = {0: PROMPT[:61], 2: PROMPT[20:59], 3: PROMPT[5:30]}
    expected = {}
    for row, prompt in rows.items():
        model.start()
        expected[row] = [model.prefill(prompt), model.feed(np.array([[7]]))[0, -1]]
    model.start(batch=4)
    model.feed(PROMPT[None, :50], first=2)  # what another sequence left
    model.forget(2)
    logits = {}
    for piece in range(0, 61, 17):
        for row, prompt in rows.items():
            part = prompt[piece : piece + 17]
            if part.size:
                logits[row] = model.feed(part[None], first=row)[0, -1]
    # The longest row is at the end of the capacity, and the padding of the calls beyond it.
    ids = np.full((3, 5), 7)
    second = dict(zip((2, 3), model.feed(ids, np.array([0, 1, 1]), first=1)[1:, -1], strict=True))
    second[0] = model.feed(ids, np.array([1, 0, 0]))[0, -1]
    assert model.length.tolist() == [62, 0, 40, 26]
    for row, (first_wanted, second_wanted) in expected.items():
        np.testing.assert_allclose(logits[row], first_wanted, atol=MODEL["float32"], rtol=MODEL["float32"])
        np.testing.assert_allclose(second[row], second_wanted, atol=MODEL["float32"], rtol=MODEL["float32"])
    model.feed(np.array([[7, 7], [7, 7]]), np.array([2, 0]))
    with pytest.raises(RunError, match="65 tokens exceed"):
        model.feed(np.array([[7]]))
    model.feed(PROMPT[None, :40], first=1)  # others still have room
    model.feed(np.full((2, 5), 7), np.array([0, 5]))
    assert model.length.tolist() == [64, 45, 40, 26]


@pytest.mark.parametrize(
    ("version", "runs"), [("1.23.2", False), ("1.24.4", False), ("1.25.0", True), ("1.31.1", True), ("2.0", True)]
)
def test_runtimes_that_are_too_old_are_refused_before_a_session(
    export_tiny: Exporter, monkeypatch: pytest.MonkeyPatch, version: str, runs: bool
) -> None:
    monkeypatch.setattr(onnxruntime, "__version__", version)
    if runs:
        OrtModel(export_tiny().path)
        return
    monkeypatch.setattr(onnxruntime, "InferenceSession", None)
    with pytest.raises(RunError, match=f"onnxruntime {version} is installed, and packages need 1.25"):
        OrtModel(export_tiny().path)


def test_a_model_that_nobody_has_is_gone(export_tiny: Exporter) -> None:
    """Its memory, too: proofs open one session after another."""
    model = OrtModel(export_tiny().path, threads=1)
    model.start()
    model.feed(np.array([[1, 2, 3]]))
    gone = weakref.ref(model)
    del model
    assert gone() is None
