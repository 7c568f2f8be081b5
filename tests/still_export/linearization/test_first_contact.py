"""The first linearization of a new user: nothing but a base, defaults that fit together, a cost that is said, curves, nothing left."""

from __future__ import annotations

import csv
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from still_export.cli.main import main
from still_export.errors import ConfigError, DataError
from still_export.linearization import cost, curves
from still_export.linearization.budget import Budget
from still_export.linearization.linearize import linearize
from still_export.linearization.recipe import ROW_TOKENS, Recipe, preset, presets, read_recipe
from still_export.texts.texts import python_documentation
from tests.still_export.training import make_base, make_text, small_recipe


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a context shorter than the usual row."""
    return make_base(tmp_path_factory.mktemp("base"), max_position_embeddings=192, num_hidden_layers=2)


def test_recipes_of_the_package() -> None:
    assert set(presets()) == {
        "exact",
        "tuned",
        "paper",
        "retrieval",
        "liger-gla",
        "gla",
        "gdn",
        "allmem",
        "blocks",
        "moh",
    }
    paper = read_recipe(preset("paper"), {})
    assert paper == Recipe(), "the options' defaults are the paper's"
    tuned = read_recipe(preset("tuned"), {"finetune_rate": 7e-4})
    assert tuned.finetune_rate == 7e-4 and Budget.read(tuned.budget) == Budget()
    exact = read_recipe(preset("exact"), {})
    assert not exact.finetune_steps and not exact.transfer_steps and Budget.read(exact.budget).found == 0.95
    assert read_recipe(preset("retrieval"), {}).natural
    with pytest.raises(
        ConfigError,
        match=r"known: allmem, blocks, exact, gdn, gla, liger-gla, moh, paper, retrieval, tuned. Did you mean 'exact'",
    ):
        preset("exac")


def test_rows_fit_the_model() -> None:
    assert Recipe().fitted(8192).row_tokens == ROW_TOKENS
    assert Recipe().fitted(512).row_tokens == 512
    assert Recipe(sequence_length=512).fitted(512).row_tokens == 512
    for rows in ({"sequence_length": 1024}, {"row_lengths": (1024, 512)}):
        with pytest.raises(ConfigError, match="1024, and the model has room for 512 tokens"):
            Recipe(**rows).fitted(512)
    with pytest.raises(ConfigError, match="two chunks"):
        Recipe().fitted(128)


@pytest.mark.slow
def test_a_base_is_all_it_takes(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No text, no recipe, a context shorter than the usual row; steps are given to be done in a second."""
    steps = ("--finetune-steps", "2", "--device", "cpu", "--everyday-questions", "2")
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["linearize", str(base), "-o", str(tmp_path / "STILL"), *steps])
    said = capsys.readouterr()
    assert "Python's documentation" in said.err
    assert " steps of 192 tokens; expected: bits per byte +" in said.err
    assert "of 2 layers softmax" in said.out and "Promised loss 2%, found 95%, everyday 98%, time 15: " in said.out
    assert "found NOT MEASURED" in said.out  # the base knows no answer
    assert (tmp_path / "STILL" / "model.safetensors").is_file()
    recipe = json.loads((tmp_path / "STILL" / "linearize.json").read_text())["recipe"]
    assert recipe["sequence_length"] == 192 and recipe["feature_map"] == "none"
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["linearize", str(base), "--recipe", "exact", "--config", "x.yaml", "-o", str(tmp_path / "OTHER")])
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["linearize", str(base), "--softmax-layers", "1", "-o", str(tmp_path / "OTHER")])
    assert (
        "beside the budget 'loss 2%, found 95%, everyday 98%, time 15', which chooses them" in capsys.readouterr().err
    )


def test_without_documentation_a_text_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(python_documentation()) > 300_000
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(DataError, match="--text"):
        python_documentation()


def test_nothing_is_left_of_a_run_that_did_not_begin(base: Path, text: Path, tmp_path: Path) -> None:
    output = tmp_path / "model"
    with pytest.raises(ConfigError, match="has room for 192 tokens"):
        linearize(small_recipe(base, text, sequence_length=256), output)
    assert not output.exists()
    short = make_text(tmp_path / "short.txt", words=60)
    with pytest.raises(DataError, match="fewer than one row"):
        linearize(
            small_recipe(base, short, sequence_length=180, held_out=0.7, finetune_steps=0, validation_rows=1), output
        )
    assert not output.exists()

    class Stop(BaseException):
        pass

    def stop(stage: str, step: int, *_: Any) -> None:
        if step == 3:
            raise Stop

    recipe = small_recipe(base, text, checkpoint_every=10)
    with pytest.raises(Stop):
        linearize(recipe, output, progress=stop)
    assert not output.exists()
    output.mkdir()
    with pytest.raises(Stop):
        linearize(replace(recipe, checkpoint_every=2), output, progress=stop)
    assert (output / "training" / "transfer" / "step-0000002").is_dir()


def test_cost_is_said_and_changes_nothing(
    base: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, said = small_recipe(base, text), []
    plain = linearize(recipe, tmp_path / "plain", log=said.append)
    (line,) = [line for line in said if line.startswith("cost")]
    assert line == "cost: 4 steps of attention transfer and 4 steps of LoRA, 256 tokens each, 2,048 in all"
    monkeypatch.setattr(cost, "LEAST_STEPS", 0)
    measured = linearize(recipe, tmp_path / "measured", log=said.append)
    assert re.search(r"2,048 in all; about \d+ seconds on this machine", said[-1] + "".join(said))
    for ours, theirs in zip(measured.stages, plain.stages, strict=True):
        assert ours.losses == theirs.losses and ours.validation == theirs.validation
    assert [cost.spoken(s) for s in (0.2, 89, 100, 6000)] == ["1 seconds", "89 seconds", "2 minutes", "1.7 hours"]


class Writer:
    """In the place of TensorBoard's."""

    made: ClassVar[list[Writer]] = []

    def __init__(self, folder: str, **options: Any) -> None:
        self.folder, self.options = folder, options
        self.scalars: list[tuple[str, float, int]] = []
        Writer.made.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def close(self) -> None: ...


def test_curves(base: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    recipe = small_recipe(base, text)

    def stop(stage: str, step: int, *_: Any) -> None:
        if (stage, step) == ("finetune", 3):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        linearize(recipe, tmp_path / "model", progress=stop)
    result = linearize(recipe, tmp_path / "model", resume=True)
    with (tmp_path / "model" / "training" / "curves.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for stage in result.stages:
        own = [row for row in rows if row["stage"] == stage.name]
        assert [int(row["step"]) for row in own] == [1, 2, 3, 4]  # step 3 came twice and is there once
        assert [float(row["loss"]) for row in own] == stage.losses
        assert [(int(r["step"]), float(r["validation"])) for r in own if r["validation"]] == stage.validation
        assert all(float(row["rate"]) > 0 and float(row["tokens_per_s"]) > 0 for row in own)
    last = Writer.made[-1]
    assert last.options["purge_step"] == 3 and Path(last.folder).name == "tensorboard"
    assert [s for n, _, s in last.scalars if n == "finetune/loss"] == [3, 4]
    assert [v for n, v, _ in last.scalars if n == "finetune/loss"] == result.stages[1].losses[2:]
