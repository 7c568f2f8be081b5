"""Heads that guess tokens ahead: what they say is what their definition says, and answers are what they are without them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import still_export
from still_export.errors import CheckpointError
from still_export.graph.options import ExportOptions
from still_export.models.ahead import AheadMixin
from still_export.models.load import open_source
from still_export.package.cache import CACHE_VARIABLE
from still_export.package.files import HEAD
from still_export.proof.package import VerifyOptions, verify
from still_export.runtime.head import Ahead, Head
from still_export.runtime.ort import OrtModel
from still_export.runtime.sampling import RunError, Sampling
from still_export.targets.export import export
from still_export.targets.ort.options import OrtOptions
from tests.still_export.head_models import LAYERS, Published, published, right_by_construction
from tests.still_export.serving.test_guesses import Always
from tests.tolerances import MODEL

pytestmark = pytest.mark.slow  # each exports a model

GUESSES, PROMPT = 3, [5, 9, 3, 44, 17, 8, 21, 60, 2, 13, 30]
CLOSE: dict[str, Any] = dict.fromkeys(("rtol", "atol"), MODEL["float32"])


def exported(theirs: Published, folder: Path, **options: Any) -> Path:
    theirs.save(folder / "model")
    asked = ExportOptions(str(folder / "model"), **{"speculate": GUESSES, **options})
    return export(asked, folder / "package", options=OrtOptions(native=False)).path


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package that several tests read."""
    return exported(published("qwen3_5_text"), tmp_path_factory.mktemp("qwen"))


def opened(package: Path, always: bool = True) -> OrtModel:
    model = OrtModel(package, threads=1)
    head = model.head
    assert head is not None
    if always:
        model.speculation = Always(GUESSES, lambda tokens, sequence: Ahead(head, tokens, sequence))
    model.start()
    return model


def asked(model: OrtModel, sequence: int, tokens: list[int]) -> np.ndarray:
    assert model.head is not None
    return np.array([model.head.begin(sequence, tokens[0]), *map(model.head.go_on, tokens[1:])])


@pytest.mark.parametrize("family", LAYERS)
def test_logits_are_those_of_the_definition(family: str, tmp_path: Path) -> None:
    """By transformers' own layers in float64: behind pieces of prompts, guesses of which some hold, and steps, beside another sequence."""
    theirs = published(family)
    model = opened(exported(theirs, tmp_path))
    model.start(2)
    texts: list[list[int]] = [[], []]

    def holds() -> None:
        for number, text in enumerate(texts):
            if text:
                more = [7, 40 + number, 11]
                np.testing.assert_allclose(asked(model, number, more), theirs.logits(text, more), **CLOSE)

    model.feed(np.array([PROMPT[:4]]), first=1)
    texts[1] += PROMPT[:4]
    holds()
    model.feed(np.array([PROMPT[4:], PROMPT[:7]]), np.array([1, 7]))
    texts = [PROMPT[4:5], texts[1] + PROMPT[:7]]
    holds()
    for held in ([4, 0], [1, 3], [0, 4]):
        model.guess(np.array([[6, 7, 8, 9], [9, 8, 7, 6]]))
        model.accept(np.array(held))
        texts = [texts[0] + [6, 7, 8, 9][: held[0]], texts[1] + [9, 8, 7, 6][: held[1]]]
        holds()
    model.step(np.array([33, 34]))
    texts = [texts[0] + [33], texts[1] + [34]]
    kept = {name: array.copy() for name, array in model.take(1).items()}
    model.forget(1)
    model.put(0, kept, len(texts[1]))
    texts = [texts[1], []]
    holds()


def test_a_head_that_is_right_is_accepted(tmp_path: Path) -> None:
    package = exported(right_by_construction(), tmp_path)
    plain = still_export.load(package, threads=1, guess="none")
    model = opened(package)
    for sampling in (Sampling(), Sampling(0.8, seed=5)):
        model.start()
        before = model.speculation.to_dict()  # type: ignore[union-attr]
        found = list(model.generate(PROMPT, 41, sampling))
        plain.runner.start()
        assert found == list(plain.runner.generate(PROMPT, 41, Sampling(sampling.temperature, seed=5)))
        said = model.speculation.to_dict()  # type: ignore[union-attr]
        guessed, held = (said[n] - before[n] for n in ("guessed_tokens", "accepted_tokens"))
        assert held == guessed > 0 if sampling.temperature == 0 else 0 <= held < guessed


def test_answers_and_states_are_kept_with_it(qwen: Path, tmp_path: Path) -> None:
    """A snapshot, a prefix and another sequence leave the head where it was."""
    plain, guessing = still_export.load(qwen, threads=1, guess="none"), still_export.load(qwen, threads=1)
    assert guessing.runner.speculation is not None and plain.runner.speculation is None
    guessing.runner.speculation = opened(qwen).speculation
    head = guessing.runner.head  # type: ignore[attr-defined]
    guessing.runner.speculation.guesser = lambda tokens, sequence: Ahead(head, tokens, sequence)  # type: ignore[union-attr]
    for model in (plain, guessing):
        model.read(PROMPT).save(tmp_path / "state")
        model.restore(tmp_path / "state")
    for options in ({}, {"temperature": 0.9, "seed": 3}):
        right, found = (model.generate([7, 8], max_tokens=30, **options) for model in (plain, guessing))
        assert right.tokens == found.tokens


CONTROLS = ["early", "exchanged", "kept"]


def spoil(control: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if control == "early":  # hidden states one token early
        add: Callable[..., None] = Head.add

        def early(self: Head, first: int, tokens: Any, counts: Any, hidden: np.ndarray) -> None:
            add(self, first, tokens, counts, np.roll(hidden, 1, axis=1))

        monkeypatch.setattr(Head, "add", early)
    elif control == "exchanged":  # embedding and hidden state, in the concatenation

        def decode(self: Any, positions: Tensor, cache: Any, *, input_ids: Tensor, hidden: Tensor, **more: Any) -> Any:
            parts = (
                self.hidden_norm(hidden.to(self.fc.weight.dtype)),
                self.embedding_norm(self.model.embed_tokens(input_ids)),
            )
            return super(AheadMixin, self).decode(positions, cache, inputs_embeds=self.fc(torch.cat(parts, -1)), **more)  # type: ignore[misc]

        monkeypatch.setattr(AheadMixin, "decode", decode)
    else:  # what guesses left in the cache
        call: Callable[..., np.ndarray] = Head._call

        def kept(self: Any, first: int, tokens: Any, counts: Any, past: np.ndarray, hidden: Any) -> np.ndarray:
            if len(past) == 1:  # a row of a guess is taken for one of what was read
                past = past + int(past[0] < getattr(self, "rows", {}).get(first, 0))
                self.rows = {first: int(past[0] + counts[0])}
            return call(self, first, tokens, counts, past, hidden)

        monkeypatch.setattr(Head, "_call", kept)


@pytest.mark.parametrize("control", CONTROLS)
def test_verify_asks_the_head(control: str, qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = qwen
    if control == "exchanged":
        with monkeypatch.context() as patched:
            spoil(control, patched)
            package = exported(published("qwen3_5_text"), tmp_path)
    else:
        if control == "early":  # as it is without either fault
            report = verify(package, VerifyOptions(lengths=(5,), decode_steps=3), tmp_path).report
            assert (
                report.passed and sum(output.case == "head, guessed" for output in report.outputs) == 2 * 5
            )  # in float32 and in its type
        spoil(control, monkeypatch)
    report = verify(package, VerifyOptions(lengths=(5,), decode_steps=3), tmp_path).report
    failed = {output.output for output in report.outputs if not output.passed}
    assert "mtp_logits" in failed
    assert all(output.startswith(("mtp_", "present_mtp_")) for output in failed)


WIDTH: dict[str, Any] = dict(
    vocab_size=2048,
    hidden_size=1024,
    intermediate_size=3584,
    num_attention_heads=8,
    head_dim=256,
    linear_num_key_heads=16,
    linear_num_value_heads=16,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
)
"""Of Qwen3.5-0.8B, with fewer tokens."""
TWO: dict[str, Any] = dict(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])


@pytest.mark.long
@pytest.mark.parametrize(
    "sizes, options",
    [
        (WIDTH, {}),
        (dict(linear_value_head_dim=16, hidden_size=64, intermediate_size=96), dict(dtype="float16")),
        (dict(linear_value_head_dim=16, hidden_size=64, intermediate_size=96), dict(quantize="int4")),
    ],
    ids=["published width", "float16", "int4"],
)
def test_verify_at_other_widths_and_types(sizes: dict[str, Any], options: dict[str, Any], tmp_path: Path) -> None:
    package = exported(published("qwen3_5_text", **sizes, **TWO), tmp_path, **options)
    report = verify(package, VerifyOptions(lengths=(5,), decode_steps=3), tmp_path).report
    assert {output.output for output in report.outputs if not output.passed} == set()


def test_the_kernels_for_cpus(tmp_path: Path, kernels_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(kernels_cache))
    theirs = published("qwen3_5_text")
    theirs.save(tmp_path / "model")
    asked = ExportOptions(str(tmp_path / "model"), speculate=GUESSES)
    package = export(asked, tmp_path / "package", options=OrtOptions(native=None)).path
    report = verify(package, VerifyOptions(lengths=(5,), decode_steps=3), tmp_path).report
    assert report.passed and OrtModel(package).native is not None


def test_without_speculate_it_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    package = exported(published("qwen3_5_text"), tmp_path, speculate=0)
    assert "15 tensors of layers that guess tokens ahead" in caplog.text and not (package / HEAD).exists()
    with pytest.raises(RunError, match="has no head that guesses tokens ahead"):
        still_export.load(package, guess="mtp")


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t.pop("mtp.fc.weight"), r"layers that guess tokens ahead \(MTP\).*lacks fc.weight"),
        (lambda t: t.update({"mtp.fc.weight": torch.zeros(24, 24)}), r"tensor fc.weight has shape \[24, 24\]"),
        (lambda t: t.update({"mtp.what.weight": torch.zeros(2)}), "unknown tensors model.what.weight"),
        (lambda t: t["mtp.fc.weight"].fill_(torch.nan), "mtp.fc.weight in .* holds NaN"),
    ],
    ids=["missing", "shape", "unknown", "NaN"],
)
def test_damaged_heads_are_refused(change: Callable[[dict[str, Tensor]], Any], message: str, tmp_path: Path) -> None:
    published("qwen3_5_text").save(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        export(
            ExportOptions(str(tmp_path / "model"), speculate=GUESSES),
            tmp_path / "package",
            options=OrtOptions(native=False),
        )
    assert not (tmp_path / "package").exists()


def test_a_damaged_package_is_refused(qwen: Path, tmp_path: Path) -> None:
    package = Path(shutil.copytree(qwen, tmp_path / "package"))
    (package / HEAD).write_bytes(b"?" * 9)
    with pytest.raises(RunError, match=r"mtp\.onnx is not the file that was exported"):
        OrtModel(package)


def test_heads_of_more_layers_are_left_out(tmp_path: Path) -> None:
    published("qwen3_5_text").save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "mtp_num_hidden_layers": 2}))
    assert open_source(tmp_path).ahead is None
