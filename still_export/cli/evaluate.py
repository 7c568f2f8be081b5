"""still-export evaluate: what a model knows, and how much each part of STILL attention contributes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from still_export.cli.output import Output, ReportFile, command_line, report_folder
from still_export.errors import ConfigError

EXAMPLES = """
Examples:

    still-export evaluate MODEL --text held_out.txt -o evaluation

    still-export evaluate MODEL --teacher BASE --lengths 1024,4096 --tasks needle,passkey -o evaluation

    still-export evaluate PACKAGE --text held_out.txt --contexts "" --tasks niah_multikey,babi_2 --lengths 4096 --depths 5 -o ruler

    still-export evaluate http://127.0.0.1:8000/v1 --tokenizer MODEL --tasks niah_single --lengths 4096 -o served

    still-export evaluate INT4 INT8 FLOAT32 --text held_out.txt --tasks needle --lengths 2048 -o which
"""


def evaluate(
    flags: dict[str, Any],
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL",
            help="STILL model folder, softmax model, packages, or addresses of servers (http://HOST/v1); one or more.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder for tables.", show_default="MODEL/evaluation"),
    ] = None,
    report: ReportFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Measure bits per byte and retrieval: teacher, STILL, and STILL without salient tokens, linear part or norm-preserving map.

    Packages are also compared by size, memory and speed.
    """
    from dataclasses import asdict

    from still_export.doctor import machine
    from still_export.evaluation.evaluate import EvaluationOptions
    from still_export.evaluation.models import evaluate as run
    from still_export.evaluation.served import is_served
    from still_export.report import evaluate as looks
    from still_export.report.render import write_report

    options, out = EvaluationOptions(**flags), Output(as_json, quiet)
    if output is None and is_served(models[0]):
        raise ConfigError(f"{models[0]}: a server has no folder for the tables. Name one with -o OUTPUT.")
    folder = output or Path(models[0]) / "evaluation"

    def started(count: int) -> Callable[[str], None]:
        report_folder(folder)
        return bar.enter_context(out.bar("evaluating", count))

    with contextlib.ExitStack() as bar:
        result = run(models, options, folder, command=command_line(), started=started)
    if report is not None:
        write_report(looks.page(asdict(result), models[0], options.depths, machine(), command_line()), report)
        out.log(f"report to look at: {report}")
    out.result({"folder": str(folder), **asdict(result)}, result.table(), f"tables: {folder}")
