"""still-export lower: from a portable package to the package of a target."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from still_export.cli.output import Output, command_line, next_commands
from still_export.folders.sources import demand_package
from still_export.package.staging import demand_free

EXAMPLES = """
Examples:

    still-export lower package --to genai -o for_genai

    still-export lower package --to trt --arch sm_87 --batch 4 -o for_tensorrt

    still-export lower package --to onnx --dtype float16 -o half
"""


def lower(
    flags: dict[str, Any],
    package: Annotated[Path, typer.Argument(help="Portable package, as `still-export MODEL -o PACKAGE` writes it.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Package folder to write.")],
    dtype: Annotated[
        str | None,
        typer.Option(help="Narrow a package in float32 to float16 or bfloat16.", show_default="as it was exported"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing package.")] = False,
    dump_dir: Annotated[
        Path | None, typer.Option(help="Write the graph after each step here, without weights.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Lower a portable package to a target without the model. Bits and capacity stay as exported.

    Low-bit weights in a form or type that the target lacks are quantized again from the model that the package names.
    """
    demand_package(package, "lower")
    demand_free(output, force)
    from still_export.targets.export import lower_or_export
    from still_export.targets.registry import names, targets_of

    to = flags.pop("to", names()[0])
    target, out = targets_of(to)[0], Output(as_json, quiet)
    common: dict[str, Any] = dict(dtype=dtype, force=force, command=command_line(), dump_dir=dump_dir)
    with out.steps() as progress:
        made = lower_or_export(package, to, output, flags, progress=progress, **common)
    ready = next_commands(output, target.to, ready=not target.built)
    size = sum(entry["size_bytes"] for entry in made.manifest["files"].values())
    content = {"package": str(output), "target": made.manifest["target"]}
    out.result(content, f"{output}: {target.to}, {len(made.manifest['files'])} files, {size / 1e6:,.0f} MB", ready)
