"""Layer selection: it finds the layer that linear attention hurts, alone or shared out, in one go or resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from still_export import select_layers as module
from still_export.config import FULL, HYBRID
from still_export.errors import ConfigError, TrainingError
from still_export.linearize import linearize
from still_export.load import load_model
from still_export.select_layers import best, select_layers
from tests.still_export.training import byte_tokenizer, make_base, make_text, small_recipe


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in which layer 1 alone has attention that matters: the others' outputs are scaled to almost nothing."""
    folder = make_base(tmp_path_factory.mktemp("base") / "model")
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for index, layer in enumerate(model.model.layers):
            layer.self_attn.o_proj.weight.mul_(5.0 if index == 1 else 1e-3)
            layer.self_attn.q_proj.weight.mul_(3.0)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text(tmp_path_factory.mktemp("text") / "text.txt")


def test_finds_the_layer_that_matters_and_resumes(
    base: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = small_recipe(base, text, sequence_length=96)
    choice = select_layers(recipe, 1, tmp_path / "layers", steps=1, rounds=3)
    assert choice.layers == [1] and choice.layer_types == (HYBRID, FULL, HYBRID)
    assert choice.rounds == 2  # stable after two
    assert choice.scores[1] > 5 * max(abs(choice.scores[0]), abs(choice.scores[2]))
    saved = json.loads((tmp_path / "layers" / "layers.json").read_text())
    assert saved["layer_types"] == list(choice.layer_types) and len(saved["scores_by_round"]) == 2

    class Killed(Exception):
        pass

    seen = []

    def log(line: str) -> None:
        seen.append(line)
        if line.startswith("round 2: layer 0"):
            raise Killed

    with pytest.raises(Killed):
        select_layers(recipe, 1, tmp_path / "again", steps=1, rounds=3, log=log)
    trained = []
    original = module._Candidates._save
    monkeypatch.setattr(
        module._Candidates, "_save", lambda self, layer, *rest: (trained.append(layer), original(self, layer, *rest))
    )
    again = select_layers(recipe, 1, tmp_path / "again", steps=1, rounds=3, resume=True)
    assert again.scores == choice.scores and trained == [1, 2]


def test_mixed_model_from_the_choice(base: Path, text: Path, tmp_path: Path) -> None:
    recipe = small_recipe(base, text, layer_types=(HYBRID, FULL, HYBRID), transfer_steps=1, finetune_steps=1)
    result = linearize(recipe, tmp_path / "model")
    model = load_model(tmp_path / "model")
    assert model.config.still.layer_types == (HYBRID, FULL, HYBRID)
    assert len(result.stages[0].parts) == 2  # the softmax layer has nothing to learn
    with torch.no_grad():
        assert torch.isfinite(model(torch.randint(0, 256, (1, 90))).logits).all()


def test_ranking_and_bad_input(base: Path, text: Path, tmp_path: Path) -> None:
    assert best({0: 0.1, 1: 0.5, 2: 0.5, 3: 0.2}, 3) == [1, 2, 3]
    with pytest.raises(ConfigError, match="4 softmax layers of a model with 3"):
        select_layers(small_recipe(base, text), 4, tmp_path / "layers")
    select_layers(small_recipe(base, text, transfer_steps=0), 1, tmp_path / "layers", steps=1, rounds=1)
    with pytest.raises(TrainingError, match="another run"):
        select_layers(small_recipe(base, text, transfer_steps=0, seed=5), 1, tmp_path / "layers", steps=1, resume=True)
