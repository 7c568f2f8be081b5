"""Families by the command that a user gives: a base alone, killed and resumed, exported, verified."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from still_export.linearization.linearize import linearize
from still_export.linearization.recipe import preset, read_recipe
from still_export.mixers.layers import HYBRID
from tests.still_export.training import make_base, make_text
from tests.still_export.verbs import call

LONG = pytest.mark.long


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        "qwen3",
        *(pytest.param(family, marks=LONG) for family in ("smollm3", "mistral", "qwen3_moe", "gemma3_text", "phi3")),
    ],
)
def test_a_base_becomes_a_proven_package(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights are random, so nothing can be found and any loss will do."""
    base = make_base(tmp_path / "base", family, max_position_embeddings=192)
    text, output, package = make_text(tmp_path / "text.txt"), tmp_path / "STILL", tmp_path / "package"
    given = (
        "--text",
        text,
        "--finetune-steps",
        "4",
        "--checkpoint-every",
        "1",
        "--device",
        "cpu",
        "--chunk-size",
        "16",
    )
    given = (
        *given,
        "--recipe",
        "tuned",
        "--everyday-questions",
        "2",
        "--budget",
        "loss 100%, found 0%, everyday 0%, time 15",
    )

    def kill(stage: str, step: int, *_: object) -> None:
        if step == 3:
            raise KeyboardInterrupt

    options = {
        "base": str(base),
        "texts": (str(text),),
        "finetune_steps": 4,
        "checkpoint_every": 1,
        "device": "cpu",
        "chunk_size": 16,
    }
    recipe = read_recipe(
        preset("tuned"), {**options, "everyday_questions": 2, "budget": "loss 100%, found 0%, everyday 0%, time 15"}
    )
    with pytest.raises(KeyboardInterrupt):
        linearize(recipe, output, progress=kill)
    assert call("linearize", base, "-o", output, "--resume", *given) == 0, capsys.readouterr().err
    report = json.loads((output / "linearize.json").read_text())
    assert len(report["stages"][0]["losses"]) == 4 and "NOT met" not in report["promises"].values()
    assert HYBRID in report["recipe"]["layer_types"]
    assert call("export", output, "--to", "onnx", "-o", package, "--quiet") == 0
    capsys.readouterr()
    code = call("verify", package, "--lengths", "1,17,50", "--decode-steps", "4", "--quiet")
    assert code == 0, capsys.readouterr()
    assert "HybridAttention" in json.loads((package / "manifest.json").read_text())["ops"]
