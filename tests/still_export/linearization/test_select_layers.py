"""Layer selection: it finds the layer that linear attention hurts, alone or shared out, in one go or resumed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from still_export.cli.main import main
from still_export.errors import ConfigError, TrainingError
from still_export.linearization import select_layers as module
from still_export.linearization.lookup import attention_to_fact
from still_export.linearization.select_layers import best, select_layers
from still_export.mixers.hybrid_attention.modes import make_trainable
from still_export.mixers.layers import FULL, HYBRID
from still_export.models.load import load_model
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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.long
def test_two_processes_share_the_candidates(base: Path, text: Path, tmp_path: Path) -> None:
    recipe = small_recipe(base, text, sequence_length=96)
    alone = select_layers(recipe, 1, tmp_path / "alone", steps=1, rounds=1)
    config = tmp_path / "recipe.yaml"
    config.write_text(yaml.safe_dump(recipe.to_dict()), encoding="utf-8")
    launch = [sys.executable, *"-m torch.distributed.run --standalone --nproc-per-node 2".split()]
    verb = [*"-m still_export.cli.main select-layers --steps 1 --rounds 1 --quiet --config".split(), str(config)]
    done = subprocess.run(
        [*launch, *verb, "-o", str(tmp_path / "shared")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    shared = json.loads((tmp_path / "shared" / "layers.json").read_text())
    assert shared["layers"] == alone.layers
    assert list(shared["scores"].values()) == pytest.approx(list(alone.scores.values()), rel=1e-3, abs=1e-6)


@pytest.mark.long
@pytest.mark.slow
def test_mixed_model_end_to_end(base: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Choose a layer, linearize the others, export, and hold ONNX Runtime to PyTorch: only commands that a user types."""
    recipe = small_recipe(base, text, sequence_length=96, transfer_steps=1, finetune_steps=1)
    config, model, package = tmp_path / "recipe.yaml", tmp_path / "model", tmp_path / "package"
    config.write_text(yaml.safe_dump(recipe.to_dict()), encoding="utf-8")
    for folder in (model, tmp_path / "model.layers"):  # of an earlier run
        (folder / "training").mkdir(parents=True)
        (folder / "training" / "run.json").touch()
    for arguments in (
        ["linearize", "--config", config, "--softmax-layers", 1, "-o", model, "--force"],
        [model, "--to", "onnx", "-o", package],
        ["verify", package, "--lengths", "1,8,17,40", "--decode-steps", "10"],
    ):
        with pytest.raises(SystemExit) as stop:
            main([str(a) for a in arguments])
        assert not stop.value.code
    assert "PASSED" in capsys.readouterr().out
    assert load_model(model).config.still.layer_types == (HYBRID, FULL, HYBRID)
    assert len(json.loads((model / "linearize.json").read_text())["stages"][0]["parts"]) == 2  # the others' maps
    past = {t.name for t in onnx.load(package / "model.onnx", load_external_data=False).graph.input}
    assert {"past_kv_state.0", "past_key.1", "past_kv_state.2"} <= past and "past_kv_state.1" not in past


def test_attention_to_a_fact_is_that_of_the_base(base: Path, text: Path, tmp_path: Path) -> None:
    """By transformers' own attention weights."""
    ids = np.random.default_rng(0).integers(0, 200, 90)
    ids[40:46] = ids[-6:] = [201, 202, 203, 204, 205, 206]
    plain = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    with torch.no_grad():
        weights = plain(torch.from_numpy(ids)[None], output_attentions=True).attentions
    expected = torch.stack([w[0][:, range(83, 89), range(40, 46)].mean(1) for w in weights])
    model = load_model(base, attach_untrained=True)
    found = attention_to_fact(model, make_trainable(model), ids, 6)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    choice = select_layers(small_recipe(base, text, sequence_length=256), 2, tmp_path / "layers", by="retrieval")
    scores = list(choice.scores.values())
    assert choice.layers == sorted(range(3), key=lambda layer: -scores[layer])[:2] and min(scores) > 0
    with pytest.raises(ConfigError, match="by='size' is unknown"):
        select_layers(small_recipe(base, text), 1, tmp_path / "other", by="size")


def test_ranking_and_bad_input(base: Path, text: Path, tmp_path: Path) -> None:
    assert best({0: 0.1, 1: 0.5, 2: 0.5, 3: 0.2}, 3) == [1, 2, 3]
    with pytest.raises(ConfigError, match="4 softmax layers of a model with 3"):
        select_layers(small_recipe(base, text), 4, tmp_path / "layers")
    select_layers(small_recipe(base, text, transfer_steps=0), 1, tmp_path / "layers", steps=1, rounds=1)
    with pytest.raises(TrainingError, match="another run"):
        select_layers(small_recipe(base, text, transfer_steps=0, seed=5), 1, tmp_path / "layers", steps=1, resume=True)
