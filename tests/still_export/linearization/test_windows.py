"""Bases with windows of their own: layers have the same numbers in needs, trials, the plan and config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from still_export.errors import ConfigError
from still_export.linearization import plan as planning
from still_export.linearization.linearize import linearize
from still_export.linearization.select_layers import select_layers
from still_export.mixers.layers import FULL, HYBRID, WINDOWED
from tests.still_export.tiny import FAMILIES
from tests.still_export.training import make_base, make_text, small_recipe

SLIDES = "sliding_attention"
ORDER = (SLIDES, FULL, SLIDES, FULL, FULL)
"""A place among the full layers is never the layer's number."""
WITH_WINDOWS = sorted(name for name, family in FAMILIES.items() if hasattr(family.config(), "layer_types"))


def make_windows(folder: Path, family: str = "gemma3_text", order: tuple[str, ...] = ORDER) -> Path:
    own = {"use_sliding_window": True, "no_rope_layers": [1] * len(order)}
    own = {name: value for name, value in own.items() if hasattr(FAMILIES[family].config(), name)}
    return make_base(folder, family, num_hidden_layers=len(order), layer_types=list(order), sliding_window=9, **own)


def types_of(folder: Path) -> list[str]:
    stored: list[str] = json.loads((folder / "config.json").read_text())["still_config"]["layer_types"]
    return stored


@pytest.mark.slow
@pytest.mark.parametrize("family", WITH_WINDOWS)
def test_plan_trial_and_configuration_name_the_same_layers(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, text = make_windows(tmp_path / "base", family), make_text(tmp_path / "text.txt")
    tried: list[list[int]] = []
    before = planning.set_layers

    def watch(attentions: Any, chosen: Any) -> None:
        before(attentions, chosen)
        tried.append([a.layer_idx for a in attentions if a.mode == "softmax"])

    monkeypatch.setattr(planning, "set_layers", watch)
    steps: dict[str, Any] = dict(transfer_steps=0, finetune_steps=0, batch_size=1, held_out=0.2)
    recipe = small_recipe(base, text, budget="loss 1000%, found 0%", feature_map="none", salient_per_chunk=4, **steps)
    said: list[str] = []
    result = linearize(recipe, tmp_path / "model", log=said.append)
    assert result.plan is not None
    softmax = result.plan["softmax_layers"]
    assert softmax in map(sorted, tried[1:]) and set(softmax) <= {1, 3, 4}
    assert tried[0] == [1, 3, 4]  # the base is measured with all of its own attention
    expected = [FULL if i in softmax else WINDOWED if kind == SLIDES else HYBRID for i, kind in enumerate(ORDER)]
    assert types_of(tmp_path / "model") == expected
    (line,) = [line for line in said if line.startswith("plan: ")]
    names = ", ".join(map(str, softmax)) or "none"
    assert f"{len(softmax)} of 3 layers (2 more keep the base's window) softmax ({names})" in line


@pytest.mark.slow
def test_ranked_layers_train_in_both_stages(tmp_path: Path) -> None:
    base, text = make_windows(tmp_path / "base"), make_text(tmp_path / "text.txt")
    choice = select_layers(small_recipe(base, text), 2, tmp_path / "ranked")
    assert set(choice.layers) < {1, 3, 4} and set(choice.needs.text) == {1, 3, 4}
    recipe = small_recipe(base, text, layer_types=choice.layer_types)
    result = linearize(recipe, tmp_path / "model")
    assert [len(stage.losses) for stage in result.stages] == [4, 4]
    assert types_of(tmp_path / "model") == list(choice.layer_types)


def test_a_base_of_windows_alone_is_refused(tmp_path: Path) -> None:
    base, text = make_windows(tmp_path / "base", order=(SLIDES, SLIDES)), make_text(tmp_path / "text.txt")
    with pytest.raises(ConfigError):
        linearize(small_recipe(base, text), tmp_path / "model")
