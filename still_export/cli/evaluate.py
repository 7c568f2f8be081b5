"""still-export evaluate: what a model knows, and what each part of STILL attention gives it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from still_export.cli.output import Output, ReportFile, command_line, report_folder
from still_export.errors import ConfigError
from still_export.extras import demand

EXAMPLES = """
Examples:

    still-export evaluate MODEL --text held_out.txt -o evaluation

    still-export evaluate MODEL --teacher BASE --lengths 1024,4096 --tasks needle,passkey -o evaluation

    still-export evaluate MODEL --teacher BASE --text code.txt --tasks unseen --lengths 2048 --chat 50 -o evaluation
"""


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command("evaluate", epilog=EXAMPLES)(evaluate)


def evaluate(
    model: Annotated[str, typer.Argument(help="STILL model folder, or a softmax model.", show_default=False)],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder for tables and plots.", show_default="MODEL/evaluation"),
    ] = None,
    teacher: Annotated[str | None, typer.Option(help="The softmax model that MODEL was made from.")] = None,
    text: Annotated[
        list[str] | None, typer.Option("--text", help="Text file for bits per byte and as filler; repeatable.")
    ] = None,
    contexts: Annotated[str, typer.Option(help="Context lengths for bits per byte.")] = "1024",
    text_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each text at most.")] = 1 << 17,
    tasks: Annotated[
        str, typer.Option(help="Retrieval tasks: needle, passkey, key_value, unseen, code; empty: none.")
    ] = "needle,passkey,key_value",
    lengths: Annotated[str, typer.Option(help="Prompt lengths of retrieval.")] = "1024,2048,4096",
    depths: Annotated[int, typer.Option(min=1, help="Depths at which the fact is hidden.")] = 10,
    samples: Annotated[int, typer.Option(min=1, help="Prompts for each task, length and depth.")] = 4,
    chat: Annotated[
        int, typer.Option(min=0, help="Questions of a chat whose answers' ends are counted, at most 50.")
    ] = 0,
    variants: Annotated[str, typer.Option(help="Of a STILL model; default: all.", show_default=False)] = "",
    tokenizer: Annotated[str | None, typer.Option(help="Folder of the tokenizer, if not beside the model.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, float16 or bfloat16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    seed: Annotated[int, typer.Option(help="Of the prompts.")] = 0,
    report: ReportFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Measure bits per byte and retrieval: teacher, STILL, and STILL without salient tokens, linear part, norm-preserving map."""
    from dataclasses import asdict

    from still_export.doctor import machine
    from still_export.evaluation.evaluate import (
        UNSEEN,
        VARIANTS,
        EvaluationOptions,
        evaluate,
        load_any,
        measurements,
        pick_device,
        write_evaluation,
    )
    from still_export.models.load import load_tokenizer
    from still_export.report import evaluate as looks
    from still_export.report.render import check_report, write_report

    demand("matplotlib")
    if report is not None:
        check_report(report)
    options = EvaluationOptions(
        texts=tuple(text or ()),
        context_lengths=_numbers("contexts", contexts),
        text_tokens=text_tokens,
        tasks=tuple(t for t in tasks.split(",") if t),
        lengths=_numbers("lengths", lengths),
        depths=depths,
        samples=samples,
        seed=seed,
        chat=chat,
        variants=tuple(v for v in variants.split(",") if v) or VARIANTS,
    )
    models = load_any(model, teacher, dtype, generates=bool(chat) or UNSEEN in options.tasks)
    if teacher is not None and "still" not in models:
        raise ConfigError(f"{model} is a softmax model; --teacher is for STILL models.")
    folder = report_folder(output or Path(model) / "evaluation")
    out = Output(as_json, quiet)
    with out.bar("evaluating", measurements(list(models), options)) as advance:
        result = evaluate(
            models, load_tokenizer(tokenizer or model), options, device=pick_device(device), advance=advance
        )
    write_evaluation(result, options, folder, command_line())
    if report is not None:
        write_report(looks.page(asdict(result), model, depths, machine(), command_line()), report)
        out.log(f"report to look at: {report}")
    out.result({"folder": str(folder), **asdict(result)}, result.table(), f"tables and plots: {folder}")


def _numbers(name: str, given: str) -> tuple[int, ...]:
    try:
        return tuple(int(n) for n in given.split(",") if n)
    except ValueError:
        raise ConfigError(f"--{name} {given}: give numbers separated by commas, such as 1024,4096.") from None
