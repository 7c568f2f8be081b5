"""Which layers should stay softmax: those that look facts up, and those whose far attention the text needs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from still_export.errors import ConfigError
from still_export.linearization.linearize import make_accelerator
from still_export.linearization.needs import Needs, needs_of
from still_export.linearization.objectives import make_students
from still_export.linearization.recipe import Recipe
from still_export.linearization.reuse import Reuse, measure_reuse
from still_export.linearization.run import LinearizationRun
from still_export.mixers.layers import FULL


@dataclass
class LayerChoice:
    """The result of `select_layers`.

    layers: Chosen indices, best first. needs: Of all layers. layer_types: For StillConfig.
    """

    layers: list[int]
    needs: Needs
    layer_types: tuple[str, ...]


def select_reuse(
    recipe: Recipe, output: Path, *, force: bool = False, log: Callable[[str], None] = lambda _: None
) -> Reuse:
    """Which layers may read the blocks of earlier ones (`measure_reuse`; nothing is trained); writes reuse.json into `output`.

    Raises:
        ConfigError: The recipe's mixer is not blocks, its rows are too short, or `output` exists and `force` is not given.
    """
    if recipe.mixer != "blocks":
        raise ConfigError(
            f"--mixer {recipe.mixer} chooses no blocks that layers could share. Give --find-reuse without a recipe of another mixer."
        )
    accelerator = make_accelerator(recipe)
    run = LinearizationRun(replace(recipe, layer_types=None, reuse=None), output, accelerator, lambda *_: None, log)
    run.open_folder(False, force)
    log("measuring whose blocks each layer may read")
    model = run.load_base().to(accelerator.device)
    found = measure_reuse(run, model, make_students(model))
    if accelerator.is_main_process:
        found.write(output / "reuse.json")
    accelerator.wait_for_everyone()
    return found


def select_layers(
    recipe: Recipe, count: int, output: Path, *, force: bool = False, log: Callable[[str], None] = lambda _: None
) -> LayerChoice:
    """Rank the layers by what they need (`needs_of`; nothing is trained) and choose `count`; writes layers.json into `output`.

    Raises:
        ConfigError: More layers than the model has, or `output` exists and `force` is not given.
    """
    accelerator = make_accelerator(recipe)
    run = LinearizationRun(replace(recipe, layer_types=None, budget=""), output, accelerator, lambda *_: None, log)
    if not 0 < count <= run.layers:
        raise ConfigError(f"{count} softmax layers of a model with {run.layers}. Choose fewer.")
    run.open_folder(False, force)
    log("measuring what each layer needs")
    model = run.load_base().to(accelerator.device)
    needs = needs_of(run, model, make_students(model))
    chosen = needs.ranked()[:count]
    types = tuple(FULL if layer in chosen else recipe.layer for layer in range(run.layers))
    choice = LayerChoice(chosen, needs, types)
    if accelerator.is_main_process:
        content = {**asdict(choice), "recipe": recipe.to_dict()}
        (output / "layers.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    accelerator.wait_for_everyone()
    return choice
