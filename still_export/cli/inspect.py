"""still-export inspect: what a package holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from still_export.cli.output import Output

EXAMPLES = """
Example:

    still-export inspect package
"""


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command("inspect", epilog=EXAMPLES)(inspect)


def inspect(
    package: Annotated[Path, typer.Argument(help="Package folder.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Sizes of the state only.")] = False,
) -> None:
    """Show the state's size by context length beside full attention's cache, the graph's operators, and the files."""
    from still_export.package.folder import open_package
    from still_export.package.inspect import inspect as look

    found = look(open_package(package, check_hashes=False))
    lines = [f"{'context':>9} {'state':>12} {'full attention':>15}"]
    for row in found["state"]:
        state, cache = (row[key] / 2**20 for key in ("state_bytes", "full_attention_cache_bytes"))
        lines.append(f"{row['tokens']:>9} {state:>8.1f} MiB {cache:>11.1f} MiB")
    if not quiet:
        model = found["model"]
        lines.insert(
            0,
            f"{model['family']}, {model['layers']} layers, {model['parameters'] / 1e6:.1f} M parameters, {model['dtype']}",
        )
        opsets = ", ".join(f"{domain} {version}" for domain, version in found["opset"].items())
        lines += ["", f"IR {found['ir_version']}, opsets: {opsets}; functions: {', '.join(found['functions'])}"]
        lines += [f"{count:>6} {name}" for name, count in found["nodes"].items()]
        lines += ["", *(f"{size / 2**20:>9.2f} MiB  {name}" for name, size in found["files"].items())]
        lines += ["", f"made by: {found['command']}"]
    Output(as_json, quiet).result(found, *lines)
