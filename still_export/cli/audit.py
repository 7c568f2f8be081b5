"""still-export audit: what must hold in a STILL model, and what its parts do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from still_export.cli.output import Output, ReportFile, command_line, report_folder
from still_export.sources import demand_model

EXAMPLES = """
Examples:

    still-export audit MODEL --text held_out.txt -o audit
"""


def audit(
    model: Annotated[str, typer.Argument(help="STILL model.", show_default=False)],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for audit.json.", show_default="MODEL/audit")
    ] = None,
    text: Annotated[Path | None, typer.Option(help="Text to audit on.", show_default="a built-in one")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of it at most.")] = 1024,
    tokenizer: Annotated[str | None, typer.Option(help="Folder of the tokenizer, if not beside the model.")] = None,
    report: ReportFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Check pass-through (k = 0, k = C) and the linear mass; show the norms around NP-Map and where salient tokens lie."""
    demand_model(model, "audit")
    import torch

    from still_export.doctor import machine
    from still_export.evaluation.audit import audit as run
    from still_export.evaluation.audit import passed, values, write_audit
    from still_export.evaluation.evaluate import DEFAULT_HAYSTACK
    from still_export.models.load import load_model, load_tokenizer
    from still_export.report import audit as looks
    from still_export.report.render import write_report
    from still_export.texts.texts import read_text, tokenize

    out = Output(as_json, quiet)
    loaded = load_model(model, dtype="float32")
    folder = report_folder(output or Path(model) / "audit")
    words = load_tokenizer(tokenizer or model)
    content = read_text(text) if text else DEFAULT_HAYSTACK
    ids = tokenize(content[: 16 * tokens], words, int(loaded.config.vocab_size))[:tokens]
    with out.steps() as step:
        step("auditing")
        results = run(loaded, words, torch.from_numpy(ids).long())
    write_audit(results, folder, command_line())
    if report is not None:
        write_report(looks.page(results, model, machine(), command_line()), report)
        out.log(f"report to look at: {report}")
    out.result(
        {"folder": str(folder), **values(results)},
        *(line for result in results for line in result.lines()),
        f"results: {folder / 'audit.json'}",
        "PASSED" if passed(results) else "FAILED: a property that must hold does not",
    )
    raise typer.Exit(0 if passed(results) else 1)
