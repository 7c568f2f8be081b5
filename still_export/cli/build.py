"""still-export build: the engines of a package."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from still_export.cli.errors import ended_at_once
from still_export.cli.output import Output, TrustNative, next_commands
from still_export.folders.sources import demand_package

EXAMPLES = """
Examples:

    still-export build package

    still-export build package --batch 4 --prefill-tokens 1024
"""


def build(
    flags: dict[str, Any],
    package: Annotated[Path, typer.Argument(help="Package folder, exported with --to trt or --to trt-rtx.")],
    trust_native: TrustNative = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Build the engines of a package for this machine's TensorRT and GPU; TensorRT's messages go to build.log."""
    demand_package(package, "build")
    from still_export.engines.build import BuildOptions, build_engines, discard_staged, reopen
    from still_export.package.trust import trust_package

    out, opened = Output(as_json, quiet), reopen(package)
    if trust_native:
        trust_package(package, engines=False)
    with out.steps() as progress, ended_at_once(lambda: discard_staged(package)):
        engines = build_engines(opened, BuildOptions(**flags), progress)
    out.result(
        {"package": str(package), "engines": [str(e) for e in engines]},
        *(f"{engine}: {engine.stat().st_size / 1e6:,.0f} MB" for engine in engines),
        next_commands(package, opened.manifest["target"]),
    )
