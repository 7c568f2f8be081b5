"""still-export linearize --rank-layers and --find-...: measurements of layers before any training."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from still_export.cli.output import Output

if TYPE_CHECKING:
    from still_export.linearization.recipe import Recipe
    from still_export.mixers.layers import Finder


def rank(recipe: Recipe, count: int, output: Path, force: bool, out: Output) -> None:
    """Rank layers by what linear attention would lose: text that needs far tokens, and lookup of facts."""
    from still_export.linearization.linearize import leave_processes
    from still_export.linearization.select_layers import select_layers

    choice = select_layers(recipe, count, output, force=force, log=out.log)
    leave_processes()
    template = "layer {}: {:.1%} of what the text needs from far tokens, {:.1%} of the attention from answers to facts"
    out.result(
        asdict(choice),
        *(template.format(i, choice.needs.text[i], choice.needs.lookup[i]) for i in choice.needs.ranked()),
        f"chosen: {', '.join(map(str, choice.layers))}",
        f"next: still-export linearize {recipe.base} --softmax-layers {count} -o DIR, or layer_types of {output / 'layers.json'}",
    )


def find(finder: Finder, recipe: Recipe, output: Path, force: bool, out: Output) -> None:
    """Run one layer finder and write its file."""
    from still_export.linearization.linearize import leave_processes
    from still_export.linearization.select_layers import find_layers

    found = find_layers(finder, recipe, output, force=force, log=out.log)
    leave_processes()
    file = output / f"{finder.name}.json"
    out.result(
        json.loads(file.read_text(encoding="utf-8")),
        *found.lines(),
        f"next: still-export linearize {recipe.base} --mixer {finder.mixer} --{finder.name} {file} -o DIR",
    )
