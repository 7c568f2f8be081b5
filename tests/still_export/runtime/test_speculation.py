"""Calls of guessed tokens: states and logits are those of plain decoding, whatever of the guesses holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from still_export.errors import ConfigError
from still_export.graph.options import ExportOptions
from still_export.loading.language_model import LanguageModel
from still_export.package.cache import CACHE_VARIABLE
from still_export.package.files import FOLD
from still_export.proof.package import VerifyOptions, verify
from still_export.runtime import ort
from still_export.runtime.base import Runner
from still_export.runtime.ort import OrtModel
from still_export.runtime.sampling import RunError
from still_export.targets.export import export
from still_export.targets.ort.options import OrtOptions
from still_export.targets.trt.options import RtxOptions
from still_graphs.states import ANY, StateTable
from tests.still_export.conftest import Exporter
from tests.still_export.linear_models import linear_model
from tests.still_export.packages import with_library
from tests.still_export.tiny import CHUNK, MIXED, VOCAB
from tests.tolerances import MODEL
from tools.benchmarks.guesses import equal

pytestmark = pytest.mark.slow  # each exports a model

CLOSE: dict[str, Any] = dict.fromkeys(("rtol", "atol"), MODEL["float32"])
GUESSES, SEQUENCES, STEPS = 4, 3, 3 * CHUNK
LENGTHS = np.array([1, CHUNK + 5, 2 * CHUNK - 1])
RANDOM = np.random.default_rng(7)
PROMPT, TOKENS = (RANDOM.integers(3, VOCAB, (SEQUENCES, n)) for n in (LENGTHS.max(), STEPS))

Hold = Callable[[np.random.Generator, np.ndarray], np.ndarray]
HOLDS: dict[str, Hold] = {
    "all": lambda random, brought: brought,
    "none": lambda random, brought: np.minimum(brought, 1),
    "random": lambda random, brought: random.integers(0, brought + 1),
}
"""Of the tokens that each sequence brings, how many hold."""


@pytest.fixture(params=[False, None], ids=["bodies", "kernels"])
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool | None:
    if request.param is None:
        monkeypatch.setenv(CACHE_VARIABLE, str(request.getfixturevalue("kernels_cache")))
    return request.param  # type: ignore[no-any-return]


def opened(path: Path, replays: bool = False) -> OrtModel:
    model = OrtModel(path, threads=1)
    model.replays = replays
    return model


def begun(model: Runner) -> Any:
    model.start(SEQUENCES)
    model.feed(PROMPT, LENGTHS)
    return model


def guessed(model: Runner, hold: Hold, part: slice = slice(0, SEQUENCES), tokens: np.ndarray = TOKENS) -> np.ndarray:
    """Logits of `tokens`, read by the sequences of `part` in calls of guesses, with others behind those that hold."""
    random, done, steps = np.random.default_rng(1), np.zeros(SEQUENCES, np.int64), tokens.shape[1]
    done[: part.start], done[part.stop :] = steps, steps
    logits = np.zeros((SEQUENCES, steps, VOCAB), np.float32)
    while (done < steps).any():
        brought = np.where(done < steps, random.integers(1, GUESSES + 2, SEQUENCES), 0)
        holds = np.minimum(hold(random, brought), steps - done)
        ids = random.integers(3, VOCAB, (SEQUENCES, GUESSES + 1))
        for b, count in enumerate(holds):
            ids[b, :count] = tokens[b, done[b] : done[b] + count]
        rows = model.guess(ids[part], brought[part], part.start)
        again = model.guess(ids[part], brought[part], part.start, greedy=True)  # what was not accepted was not read
        for row, likely, count in zip(rows, again, brought[part], strict=True):
            assert (row.argmax(-1)[len(row) - count :] == likely[len(row) - count :]).all()
        model.accept(holds[part])
        for b, row in zip(range(SEQUENCES)[part], rows, strict=True):
            first = len(row) - brought[b]
            logits[b, done[b] : done[b] + holds[b]] = row[first : first + holds[b]]
        done += holds
    return logits


def check(path: Path, replays: bool = False) -> None:
    check_models(lambda plain=False: opened(path, replays and not plain))


def check_models(
    opened: Callable[..., Any], tokens: np.ndarray = TOKENS, holds: Mapping[str, Hold] = HOLDS, parts: int = 2
) -> None:
    """That states and logits of a runner are those of plain decoding, whatever holds."""
    plain = begun(opened(plain=True))
    logits = np.concatenate([plain.feed(tokens[:, i : i + 1]) for i in range(tokens.shape[1])], axis=1)
    expected = [{n: x.copy() for n, x in plain.take(b).items()} for b in range(SEQUENCES)]
    for name, hold in holds.items():
        for part in [slice(first, SEQUENCES) for first in range(parts)]:
            model = begun(opened())
            found, those = guessed(model, hold, part, tokens), range(SEQUENCES)[part]
            np.testing.assert_allclose(found[part], logits[part], err_msg=name, **CLOSE)
            assert (model.length[part] == plain.length[part]).all()
            captured = getattr(model, "_captured", {(1 + GUESSES, 0)})
            assert part.start or not model.replays or 1 + GUESSES in {tokens for tokens, _ in captured}
            for b in those:
                for state in model.table:
                    axis, unread = model.table.unread(state, int(model.length[b]))
                    ours, theirs = (
                        np.moveaxis(arrays[state.name], axis, 0).copy() for arrays in (model.take(b), expected[b])
                    )
                    ours[unread] = theirs[unread] = 0
                    np.testing.assert_allclose(ours, theirs, err_msg=f"{name} {state.name}", **CLOSE)


STILL: list[dict[str, Any]] = [
    dict(layer_types=MIXED),
    dict(overflow="fold_oldest", capacity_tokens=3 * CHUNK),
    dict(cache="int8", select_scope="kv_group_max", sizes=dict(head_dim=12)),
]


def test_still_beside_softmax_layers(export_tiny: Exporter, native: bool | None) -> None:
    package = export_tiny(options={"speculate": GUESSES, "native": native}, layer_types=MIXED)
    assert (OrtModel(package.path).native is None) == (native is False)
    check(package.path)


@pytest.mark.long
def test_a_thousand_calls_of_which_some_hold(export_tiny: Exporter, native: bool | None) -> None:
    options = {"speculate": GUESSES, "native": native}
    package = export_tiny(options=options, layer_types=MIXED, capacity_tokens=2048)
    tokens = np.random.default_rng(8).integers(3, VOCAB, (SEQUENCES, 1536))
    check_models(lambda plain=False: opened(package.path), tokens, {"random": HOLDS["random"]}, parts=1)


def test_calls_that_are_replayed(export_tiny: Exporter, library: str, tmp_path: Path) -> None:
    """As from a CUDA graph: calls of fixed buffers, of as many tokens as one was captured for, the first of which brings nothing."""
    with_library(export_tiny(options={"speculate": GUESSES}, layer_types=MIXED), library, tmp_path / "package")
    check(tmp_path / "package", replays=True)


def test_answers_with_calls_that_are_replayed(export_tiny: Exporter, library: str, tmp_path: Path) -> None:
    """Of one sequence, whose states change their buffers where all guesses over the end of a chunk hold."""
    with_library(export_tiny(options={"speculate": GUESSES}, layer_types=MIXED), library, tmp_path / "package")
    plain, guessing = (LanguageModel(opened(tmp_path / "package", replays)) for replays in (False, True))
    plain.runner.speculation = None
    found = equal(plain, guessing, 30, 24, seed=1)
    assert found["accepted_tokens"] and not found["parted"]


def test_the_graph_for_gpus(export_tiny: Exporter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bodies, on the CPU."""
    monkeypatch.setattr("still_export.targets.ort.kernels.compile_archive", lambda variants, archs, target: target)
    monkeypatch.setattr(
        "still_export.targets.ort.kernels.build_with_archive", lambda archive, target, include: target.write_text("-")
    )
    package = export_tiny(options={"speculate": GUESSES, "archs": ("sm_90",)}, layer_types=MIXED, chunk_size=32)
    monkeypatch.setattr(ort, "native_library", lambda *given: None)
    check(package.path)


@pytest.mark.long
@pytest.mark.parametrize("still", STILL[1:], ids=str)
def test_other_states_of_still(export_tiny: Exporter, still: dict[str, Any], native: bool | None) -> None:
    check(export_tiny(options={"speculate": GUESSES, "native": native}, **still).path)


@pytest.mark.long
@pytest.mark.parametrize(
    "family",
    [
        "qwen3_5_text",
        "granitemoehybrid",
        "falcon_h1",
        "mamba2",
        "gla",
        "lfm2",
        "kimi_linear",
        "delta_net",
        "minicpm_sala",
    ],
)
def test_linear_families(family: str, native: bool | None, tmp_path: Path) -> None:
    linear_model(family).save_pretrained(tmp_path / "model")
    asked = ExportOptions(str(tmp_path / "model"), speculate=GUESSES)
    check(export(asked, tmp_path / "package", options=OrtOptions(native=native)).path)


@pytest.mark.long
@pytest.mark.parametrize("family", ["routing_transformer", "moh_llama"])
def test_layers_of_which_a_position_says_everything(family: str, tmp_path: Path) -> None:
    """There is nothing to fold, from the first token on."""
    linear_model(family).save_pretrained(tmp_path / "model")
    asked = ExportOptions(str(tmp_path / "model"), speculate=GUESSES)
    package = export(asked, tmp_path / "package", options=OrtOptions(native=False))
    assert FOLD not in package.manifest["files"]
    check(package.path)
    model = opened(package.path)
    model.start(1)
    model.guess(PROMPT[:1, :3])
    model.accept(np.array([2]))
    assert model.length == [2]


def test_verify_reads_guesses_and_sees_one_that_is_not_undone(
    export_tiny: Exporter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = export_tiny(options={"speculate": GUESSES, "native": None}, layer_types=MIXED)
    options = VerifyOptions(lengths=(CHUNK + 1,), decode_steps=CHUNK + 3)
    report = verify(package.path, options, tmp_path).report
    assert report.passed and any(output.case.endswith("guessed") for output in report.outputs)
    monkeypatch.setattr(StateTable, "settled", ANY)  # what a chunk's begin took into the states stays there
    report = verify(package.path, options, tmp_path).report
    failed = {output.case for output in report.outputs if not output.passed}
    assert failed and all(case.endswith("guessed") for case in failed)


def demand_refusals(model: Runner) -> None:
    """Of what is accepted, and of more guesses than a call takes."""
    two = np.full((SEQUENCES, 2), 5)
    with pytest.raises(RunError, match="nothing was guessed"):
        model.accept(np.ones(SEQUENCES))
    for wrong in ([3, 1, 1], [-1, 1, 1], [1, 1]):
        model.guess(two)
        with pytest.raises(RunError, match=r"accepted=.* of the \[2, 2, 2\] tokens"):
            model.accept(np.array(wrong))
    model.guess(two)
    model.feed(two[:, :1])
    with pytest.raises(RunError, match="another call was made since"):
        model.accept(np.ones(SEQUENCES))
    with pytest.raises(RunError, match="5 guesses in one call, and this package takes 4"):
        model.guess(np.full((SEQUENCES, GUESSES + 2), 5))


def test_refusals(export_tiny: Exporter, tmp_path: Path) -> None:
    package = export_tiny(options={"speculate": GUESSES, "native": None}, layer_types=MIXED)
    demand_refusals(begun(opened(package.path)))
    with pytest.raises(RunError, match="exported with --speculate"):
        begun(opened(export_tiny(layer_types=MIXED).path)).guess(np.full((SEQUENCES, 2), 5))
    source = package.manifest["config"]["model"]
    with pytest.raises(
        ConfigError, match=f"--speculate {CHUNK + 1} is more than a chunk of this model, {CHUNK} tokens"
    ):
        export(ExportOptions(source, speculate=CHUNK + 1), tmp_path / "more")
    with pytest.raises(ConfigError, match=r"--speculate is for ort-cuda, ort-cpu, .*, not for trt-rtx"):
        export(ExportOptions(source, speculate=1), tmp_path / "rtx", to="trt-rtx", options=RtxOptions())
    with pytest.raises(ConfigError, match="--speculate -1"):
        ExportOptions(source, speculate=-1)
    with pytest.raises(ConfigError, match="--all-logits is not for --speculate"):
        ExportOptions(source, speculate=1, all_logits=True)
