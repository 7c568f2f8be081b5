"""still-export linearize: from a softmax model to a STILL model, or to one with linear attention."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from still_export.cli.errors import complain, stopping_behind_steps
from still_export.cli.output import LOADING, Output, ReportFile, command_line
from still_export.errors import ConfigError
from still_export.extras import EXTRAS, demand
from still_export.folders.model import check_model
from still_export.folders.sources import demand_model

EXAMPLES = """
Examples:

    still-export linearize BASE -o DIR

    still-export linearize BASE --budget "loss 1%, state 60%, time 30" --text book.txt -o DIR

    still-export linearize BASE --recipe retrieval --softmax-layers 4 --text book.txt -o DIR

    still-export linearize --config recipe.yaml --finetune-steps 200 -o DIR

    still-export linearize BASE --mixer gdn --softmax-layers 4 --text book.txt -o DIR

    still-export linearize BASE --rank-layers --text book.txt -o LAYERS

    still-export linearize BASE --find-reuse --sequence-length 8256 -o LAYERS

    still-export linearize BASE --adapter DIR/adapter -o AGAIN

    torchrun --nproc-per-node 2 -m still_export.cli.main linearize --config recipe.yaml -o DIR
"""


def linearize(
    flags: dict[str, Any],
    base: Annotated[
        str | None, typer.Argument(help="Softmax model: Hugging Face folder, hub id, or GGUF file.", show_default=False)
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Model folder to write.", show_default=False)
    ] = None,
    text: Annotated[
        list[str] | None, typer.Option("--text", help="Text file; repeatable. The end of each is held out.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="YAML recipe; flags override it.")] = None,
    named: Annotated[
        str | None,
        typer.Option(
            "--recipe",
            help="exact, tuned, paper, retrieval, or the mixer's own; flags override it.",
            show_default="exact, or the mixer's own",
        ),
    ] = None,
    softmax_layers: Annotated[
        int, typer.Option(min=0, help="Layers that stay softmax, found as by --rank-layers first.")
    ] = 0,
    rank_layers: Annotated[
        bool,
        typer.Option(
            "--rank-layers", help="Only rank layers: write which should stay softmax into the folder, without training."
        ),
    ] = False,
    adapter: Annotated[
        Path | None, typer.Option(help="Apply this adapter to BASE instead of training.", show_default=False)
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the output folder.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing folder.")] = False,
    report: ReportFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Turn a softmax model into a STILL model, or one with linear attention: attention transfer, then LoRA; report what each costs."""
    if base is not None:
        demand_model(base, "linearize")
    demand(*EXTRAS["train"])
    if base is not None:
        check_model(base)
    if output is None:
        raise ConfigError("no -o: give the model folder to write, -o DIR.")
    if adapter is not None and base is None:
        raise ConfigError(
            f"--adapter {adapter}: give its base model, too. Type: still-export linearize BASE --adapter {adapter} -o {output}"
        )
    from still_export.linearization.recipe import DEFAULT_PRESETS, FINDERS, preset, read_recipe
    from still_export.linearization.run_folder import TO_REPLACE, RunFolder, check_replaceable
    from still_export.texts.files import read_text

    finder = next((f for f in FINDERS.values() if flags.pop(f"find_{f.name}", False)), None)
    settings = {**flags, **({"base": base} if base else {}), **({"texts": tuple(text)} if text else {})}
    if config is not None and named is not None:
        raise ConfigError("--config and --recipe are two recipes; give one of them.")
    measures = rank_layers or finder is not None
    if config is None and named is None and not rank_layers:
        mixer = finder.mixer if finder is not None else settings.get("mixer", "still")
        named = DEFAULT_PRESETS.get(mixer, DEFAULT_PRESETS["still"])
    recipe = read_recipe(config or (preset(named) if named else None), settings)
    if softmax_layers and recipe.budget and not measures:
        raise ConfigError(
            f"--softmax-layers {softmax_layers} beside the budget {recipe.budget!r}, which chooses them; give another --recipe."
        )
    for name in recipe.texts if adapter is None else ():
        read_text(Path(name))
    if measures:
        from still_export.cli import measure_layers

        if finder is not None:
            measure_layers.find(finder, recipe, output, force, Output(as_json, quiet))
        else:
            measure_layers.rank(recipe, softmax_layers or 1, output, force, Output(as_json, quiet))
        return
    if resume and adapter is None:
        RunFolder(output).fingerprint()
    else:
        check_replaceable(output, force, TO_REPLACE if adapter is None else "Pass --force to replace it.")
    from still_export.doctor import machine

    out = Output(as_json, quiet)
    with out.waiting(LOADING):
        from still_export.linearization.folder import apply
        from still_export.linearization.linearize import leave_processes
        from still_export.linearization.linearize import linearize as run
        from still_export.linearization.trainer import StopTraining
        from still_export.package.staging import lacks_room
        from still_export.report import linearize as looks
        from still_export.report.render import write_report

    if quiet:
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
    if adapter is not None and base is not None:
        apply(base, adapter, output, tokenizer=flags.get("tokenizer"), force=force)
        out.result(
            {"model": str(output)},
            f"{output}: {base} with {adapter}",
            f"next: still-export {output} --to onnx -o PACKAGE",
        )
        return
    if softmax_layers:
        from still_export.linearization.select_layers import select_layers

        chosen = select_layers(
            recipe, softmax_layers, output.with_name(f"{output.name}.layers"), force=force or resume, log=out.log
        )
        recipe = replace(recipe, layer_types=chosen.layer_types)
    with out.training() as bar:
        progress = stopping_behind_steps(bar, StopTraining)
        try:
            result = run(
                recipe, output, resume=resume, force=force, command=command_line(), progress=progress, log=out.log
            )
        except BaseException as end:
            # Ctrl-C or a full disk, while it trains or measures, keeps what a run can go on from.
            reason = lacks_room(end)
            if (isinstance(end, Exception) and not reason) or not RunFolder(output).has_run():
                raise
            words = [word for word in sys.argv[1:] if word not in ("--resume", "--force")]
            kept = f"{reason}; a checkpoint is kept" if reason else "a checkpoint is kept"
            again = "Go on, when there is room" if reason else "Go on"
            said = f"{kept}. {again}: {shlex.join(['still-export', *words, '--resume'])}"
            complain("DiskFull" if reason else "Interrupted", said)
            raise typer.Exit(2) from None
    leave_processes()
    content = {"recipe": recipe.to_dict(), **result.to_dict()}
    if report is not None and out.first:
        write_report(looks.page(content, str(output), machine(), command_line()), report)
        out.log(f"report to look at: {report}")
    lines = [*result.said, looks.trained(content["recipe"], result.to_dict()["stages"])]
    lines += [f"bits per byte of held-out text, {name}: {bits:.4f}" for name, bits in result.bits_per_byte.items()]
    lines += [
        f"stage {s.name}: {s.steps} steps, {s.tokens / max(s.seconds, 1e-9):,.0f} tokens/s, loss {s.losses[-1]:.4f}"
        + (", ended on a plateau" if s.stopped_early else "")
        + (f", weights of step {s.kept} kept, which validated best" if 0 < s.kept < s.steps else "")
        for s in result.stages
    ]
    out.result(
        {"model": str(output), **result.to_dict()},
        *lines,
        f"next: still-export evaluate {output}   or   still-export {output} --to onnx -o PACKAGE",
    )
