"""still-export prove: every check that this machine can run on a package, as a record."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from still_export.cli.output import Output, PackageFolder, TrustNative, report_folder
from still_export.folders.sources import demand_package

EXAMPLES = """
Examples:

    still-export prove package

    still-export prove package --calls calls.npz -o proofs     on a board without PyTorch
"""


def prove(
    flags: dict[str, Any],
    package: PackageFolder,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for the record.", show_default="PACKAGE/proofs")
    ] = None,
    trust_native: TrustNative = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Build engines, compare with PyTorch, measure, and write a record; exit 1 on a mismatch. Checks that cannot run here are listed."""
    demand_package(package, "prove")
    from still_export.cli.bench import table
    from still_export.evaluation.bench import Measurement
    from still_export.evaluation.prove import ProveOptions
    from still_export.evaluation.prove import prove as show
    from still_export.package.trust import trust_package
    from still_export.proof.records import figures_line, write_record

    if trust_native:
        trust_package(package)
    out, options, folder = Output(as_json, quiet), ProveOptions(**flags), report_folder(output or package / "proofs")
    with out.steps() as progress:
        proven = show(package, options, progress)
    made = proven.record
    path = write_record(made, folder)
    speed: Any = made.figures.get("speed")
    lines = [f"{made.verdict}: {figures_line(made.figures)}", *(f"not checked here: {each}" for each in proven.missing)]
    lines += table([Measurement(**row) for row in speed["rows"]]) if speed else []
    content = {**made.model_dump(mode="json"), "record": str(path), "missing": proven.missing}
    out.result(content, *lines, f"record: {path}")
    raise typer.Exit(1 if made.verdict == "failed" else 0)
