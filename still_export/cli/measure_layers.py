"""still-export linearize --rank-layers, --find-reuse: what is measured of layers before any training."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from still_export.cli.output import Output

if TYPE_CHECKING:
    from still_export.linearization.recipe import Recipe


def rank(recipe: Recipe, count: int, output: Path, force: bool, out: Output) -> None:
    """Rank layers by what softmax does for them that linear attention cannot: predict text from far tokens, and look facts up."""
    from still_export.linearization.linearize import leave_processes
    from still_export.linearization.select_layers import select_layers

    choice = select_layers(recipe, count, output, force=force, log=out.log)
    leave_processes()
    says = "layer {}: {:.1%} of what the text needs from far tokens, {:.1%} of the attention from answers to facts"
    out.result(
        asdict(choice),
        *(says.format(i, choice.needs.text[i], choice.needs.lookup[i]) for i in choice.needs.ranked()),
        f"chosen: {', '.join(map(str, choice.layers))}",
        f"next: still-export linearize {recipe.base} --softmax-layers {count} -o DIR, or layer_types of {output / 'layers.json'}",
    )


def find_reuse(recipe: Recipe, output: Path, force: bool, out: Output) -> None:
    """Find layers that may read the blocks of earlier ones."""
    from still_export.linearization.linearize import leave_processes
    from still_export.linearization.select_layers import select_reuse

    found = select_reuse(recipe, output, force=force, log=out.log)
    leave_processes()
    out.result(
        asdict(found),
        *(
            f"layer {i}: {kind if isinstance(kind, str) else f'the blocks of layer {kind}'}"
            for i, kind in enumerate(found.layers)
        ),
        f"next: still-export linearize {recipe.base} --mixer blocks --reuse {output / 'reuse.json'} -o DIR",
    )
