"""still-export select-layers: which layers should stay softmax."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from still_export.cli.output import Output
from still_export.extras import EXTRAS, demand
from still_export.folders.model import check_model
from still_export.sources import demand_model

EXAMPLES = """
Examples:

    still-export select-layers BASE --text book.txt --count 2 -o layers

    still-export linearize BASE --text book.txt --softmax-layers 2 -o DIR

    still-export select-layers BASE --find-reuse --sequence-length 8256 -o layers
"""


def select_layers(
    asked: dict[str, Any],
    base: Annotated[
        str | None, typer.Argument(help="Softmax model: Hugging Face folder, hub id, or GGUF file.", show_default=False)
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder to write.", show_default=False)] = None,
    count: Annotated[int, typer.Option(min=1, help="Layers that stay softmax.")] = 1,
    text: Annotated[
        list[str] | None, typer.Option("--text", help="Text file; repeatable. The end of each is held out.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="YAML recipe; flags win over it.")] = None,
    find_reuse: Annotated[
        bool,
        typer.Option(
            "--find-reuse", help="Measure instead which layers may read the blocks of earlier ones (mixer blocks)."
        ),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing folder.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Rank layers by what softmax does for them that linear attention cannot: predict text from far tokens, and look facts up."""
    if base is not None:
        demand_model(base, "select-layers")
    demand(*EXTRAS["train"])
    if base is not None:
        check_model(base)
    if output is None:
        raise typer.BadParameter("give the folder to write: -o DIR", param_hint="-o")
    from still_export.linearization.recipe import preset, read_recipe
    from still_export.texts.files import read_text

    given = {**asked, **({"base": base} if base else {}), **({"texts": tuple(text)} if text else {})}
    recipe = read_recipe(preset("blocks") if find_reuse and config is None else config, given)
    for name in recipe.texts:
        read_text(Path(name))
    from still_export.linearization.linearize import leave_processes
    from still_export.linearization.select_layers import select_layers as run
    from still_export.linearization.select_layers import select_reuse

    out = Output(as_json, quiet)
    if find_reuse:
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
        return
    choice = run(recipe, count, output, force=force, log=out.log)
    leave_processes()
    says = "layer {}: {:.1%} of what the text needs from far tokens, {:.1%} of the attention from answers to facts"
    out.result(
        asdict(choice),
        *(says.format(i, choice.needs.text[i], choice.needs.lookup[i]) for i in choice.needs.ranked()),
        f"chosen: {', '.join(map(str, choice.layers))}",
        f"next: still-export linearize {recipe.base} --softmax-layers {count} -o DIR, or layer_types of {output / 'layers.json'}",
    )
