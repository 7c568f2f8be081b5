"""Layer selection: it finds the layer that linear attention hurts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from still_export.errors import ConfigError
from still_export.linearization.harms import damages
from still_export.linearization.linearize import make_accelerator
from still_export.linearization.needs import Needs, attention_to_fact
from still_export.linearization.objectives import make_students
from still_export.linearization.run import LinearizationRun
from still_export.linearization.select_layers import select_layers
from still_export.mixers.hybrid_attention.modes import make_trainable
from still_export.mixers.layers import FULL, HYBRID
from still_export.models.load import load_model
from tests.still_export.training import make_base, small_recipe
from tests.still_export.verbs import call


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planted(tmp_path_factory.mktemp("base") / "model", 1)


def planted(folder: Path, layer: int) -> Path:
    """A model whose layer `layer` alone has attention that matters: the others' outputs are scaled to almost nothing."""
    make_base(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for index, block in enumerate(model.model.layers):
            block.self_attn.o_proj.weight.mul_(5.0 if index == layer else 1e-3)
            block.self_attn.q_proj.weight.mul_(3.0)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_the_planted_layer_needs_softmax_most(layer: int, text: Path, tmp_path: Path) -> None:
    """And where no token lies beyond the window, none needs it."""
    recipe = small_recipe(planted(tmp_path / "base", layer), text)
    run = LinearizationRun(recipe, tmp_path / "run", make_accelerator(recipe), lambda *_: None, lambda _: None)
    model = run.load_base()
    attentions = make_students(model)
    modes = [attention.mode for attention in attentions]
    needs = damages(
        model, attentions, torch.randint(0, 257, (1, 192), generator=torch.Generator().manual_seed(1)), (None,)
    )[:, 0].tolist()
    assert max(range(3), key=lambda i: needs[i]) == layer
    assert needs[layer] > 100 * max(value for i, value in enumerate(needs) if i != layer) > 0
    near = damages(model, attentions, torch.randint(0, 257, (1, 16)), (None,))[:, 0].tolist()  # two chunks
    assert max(near) < 1e-8 * needs[layer]
    assert [attention.mode for attention in attentions] == modes
    assert all(parameter.grad is None for parameter in model.parameters())


def test_layers_are_chosen_by_both_needs(text: Path, tmp_path: Path) -> None:
    needs = Needs(text={0: 0.1, 1: 0.5, 2: 0.3, 3: 0.1}, lookup={0: 0.7, 1: 0.0, 2: 0.1, 3: 0.2})
    assert needs.ranked() == [0, 1, 2, 3] and needs.looking() == 2
    assert [round(needs.text_left(n), 9) for n in range(5)] == [1.0, 0.9, 0.4, 0.1, 0.0]
    recipe = small_recipe(planted(tmp_path / "base", 1), text, sequence_length=192)
    choice = select_layers(recipe, 1, tmp_path / "layers")
    assert choice.needs.text[1] > 0.9 and sum(choice.needs.lookup.values()) == pytest.approx(1)
    saved = json.loads((tmp_path / "layers" / "layers.json").read_text())
    assert saved["layers"] == choice.layers and saved["layer_types"] == list(choice.layer_types)
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe.to_dict()))
    assert call("linearize", "--config", tmp_path / "recipe.yaml", "--rank-layers", "-o", tmp_path / "again") == 0
    assert json.loads((tmp_path / "again" / "layers.json").read_text())["layers"] == choice.layers
    for count in (3, 4):
        with pytest.raises(ConfigError, match=f"{count} softmax layers of a model with 3 layers: none is left"):
            select_layers(recipe, count, tmp_path / "others")
    with pytest.raises(ConfigError, match="exists"):
        select_layers(recipe, 1, tmp_path / "layers")


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
        ["verify", package, "--lengths", "1,17", "--decode-steps", "9"],
    ):
        assert not call(*arguments)
    assert "PASSED" in capsys.readouterr().out
    assert load_model(model).config.still.layer_types == (HYBRID, FULL, HYBRID)
    assert len(json.loads((model / "linearize.json").read_text())["stages"][0]["parts"]) == 2  # the others' maps
    past = {t.name for t in onnx.load(package / "model.onnx", load_external_data=False).graph.input}
    assert {"past_kv_state.0", "past_key.1", "past_kv_state.2"} <= past and "past_kv_state.1" not in past


def test_attention_to_a_fact_is_that_of_the_base(base: Path) -> None:
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
