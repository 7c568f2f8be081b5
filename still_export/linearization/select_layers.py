"""Choice of the layers that stay softmax: those that look facts up, and those whose far attention the text needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from still_export.errors import ConfigError
from still_export.linearization.linearize import make_accelerator
from still_export.linearization.needs import Needs, needs_of
from still_export.linearization.objectives import make_students
from still_export.linearization.recipe import Recipe
from still_export.linearization.run import LinearizationRun
from still_export.mixers.layers import Finder, Found
from still_export.package.staging import write_json
from still_export.texts.texts import held_out_rows


@dataclass
class LayerChoice:
    """The result of `select_layers`.

    layers: Chosen indices, best first. needs: Of all layers. layer_types: For StillConfig.
    """

    layers: list[int]
    needs: Needs
    layer_types: tuple[str, ...]


def find_layers(
    finder: Finder, recipe: Recipe, output: Path, *, force: bool = False, log: Callable[[str], None] = lambda _: None
) -> Found:
    """Measure the layers of an untrained model with `finder` on a held-out row, and write the result into `output`. Nothing is trained.

    Raises:
        ConfigError: The recipe has another mixer, its rows are too short, or `output` exists without `force`.
    """
    if recipe.mixer != finder.mixer:
        raise ConfigError(
            f"--mixer {recipe.mixer}: --find-{finder.name} measures layers of mixer {finder.mixer}. Give it without a recipe of another "
            "mixer."
        )
    run = _measuring(recipe, output, log, **{finder.name: None})
    tokens, least = min(run.recipe.row_tokens, len(run.corpus.held_out)), finder.least_tokens(run.recipe)
    if tokens < least:
        raise ConfigError(f"rows of {tokens} tokens: {finder.short} --sequence-length {least} and a text as long.")
    run.open_folder(False, force)
    log(f"measuring the layers ({finder.name})")
    model = run.load_base().to(run.accelerator.device)
    ids = held_out_rows(run.corpus, 1, tokens).to(run.accelerator.device)
    found = finder.find(model, make_students(model), ids, run.base_weights)
    if run.accelerator.is_main_process:
        found.write(output / f"{finder.name}.json")
    run.accelerator.wait_for_everyone()
    return found


def select_layers(
    recipe: Recipe, count: int, output: Path, *, force: bool = False, log: Callable[[str], None] = lambda _: None
) -> LayerChoice:
    """Rank the layers by need (`needs_of`; nothing is trained) and choose `count`; writes layers.json into `output`.

    Raises:
        ConfigError: No layer would be left to linearize, or `output` exists without `force`.
    """
    run = _measuring(recipe, output, log, budget="")
    if not 0 < count < len(run.replaceable):
        raise ConfigError(
            f"{count} softmax layers of a model with {run.described}: none is left to linearize. Choose fewer."
        )
    run.open_folder(False, force)
    log("measuring what each layer needs")
    model = run.load_base().to(run.accelerator.device)
    needs = needs_of(run, model, make_students(model))
    chosen = needs.ranked()[:count]
    types = run.types(chosen)
    choice = LayerChoice(chosen, needs, types)
    if run.accelerator.is_main_process:
        content = {**asdict(choice), "recipe": recipe.to_dict()}
        write_json(output / "layers.json", content)
    run.accelerator.wait_for_everyone()
    return choice


def _measuring(recipe: Recipe, output: Path, log: Callable[[str], None], **changes: Any) -> LinearizationRun:
    recipe = replace(recipe, layer_types=None, **changes)
    return LinearizationRun(recipe, output, make_accelerator(recipe), lambda *_: None, log)
