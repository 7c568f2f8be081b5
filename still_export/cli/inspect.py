"""still-export inspect: the content of a package, or a summary of a model's files."""

from __future__ import annotations

import os
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from still_export.cli.output import Output, ReportFile, next_commands
from still_export.errors import ConfigError, NotLinearizedError
from still_export.folders.sources import Found, demand_model, demand_package, look

EXAMPLES = """
Examples:

    still-export inspect package

    still-export inspect package --report package.html

    still-export inspect model.gguf

    still-export inspect folder-of-a-model
"""

FILES = 3
"""Files that are listed, the largest first: a terminal ends with the summary, not with names."""


def inspect(
    package: Annotated[
        Path, typer.Argument(help="Package, or a model: its folder, a GGUF file, or an adapter's folder.")
    ],
    report: ReportFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Sizes of the state only.")] = False,
) -> None:
    """Show capacity, state size by context length next to full attention's cache, layers, types, what runs it here, and files."""
    demand_package(package, "inspect")
    if (looked := look(package)).kind in ("model", "adapter"):
        if report is not None:
            raise ConfigError(
                "--report shows a package; for a model's files inspect prints a few lines. Leave out --report."
            )
        _describe(looked, Output(as_json, quiet))
        return
    from still_export.doctor import machine, runs_here
    from still_export.package.folder import open_package
    from still_export.package.inspect import inspect as inspect_package
    from still_export.package.inspect import spans, summary
    from still_export.report import inspect as pages
    from still_export.report.render import write_report
    from still_export.targets.registry import packaged_target

    opened = open_package(package, check_hashes=False)
    found, here = inspect_package(opened), runs_here(opened)
    first = summary(opened, machine()["processor"])
    out = Output(as_json, quiet)
    if report is not None:
        write_report(pages.page(found, first, str(package), here, machine()), report)
        out.log(f"report to look at: {report}")
    lines = [f"{'context':>9} {'state':>12} {'full attention':>15}"]
    for row in found["state"]:
        state, cache = (row[key] / 1e6 for key in ("state_bytes", "full_attention_cache_bytes"))
        lines.append(f"{row['tokens']:>9} {state:>9.1f} MB {cache:>12.1f} MB")
    if not quiet:
        target = found["target"]
        ready = not packaged_target(opened.manifest).built or bool(opened.manifest.get("engines"))
        lines.append("")
        for kind in found["layers"]:
            size, most = kind["bytes_at_capacity"] / 1e6, "at most " if kind["counted"] else ""
            name = kind["kind"].replace("_", " ")
            lines.append(f"{name}: layers {spans(kind['layers'])}; {most}{size:.1f} MB of state at the capacity")
        lines += [f"{what}: {dtype}" for what, dtype in found["precision"].items()]
        lines += ["", *(f"{'yes' if f.able else 'no ':<4} {f.what}: {f.detail}" for f in here)]
        opsets = ", ".join(f"{domain} {version}" for domain, version in found["opset"].items())
        lines += ["", f"IR {found['ir_version']}, opsets: {opsets}; functions: {', '.join(found['functions'])}"]
        lines += [f"{count:>6} {name}" for name, count in found["nodes"].items()]
        largest = sorted(found["files"].items(), key=lambda entry: -entry[1])
        lines += ["", *(f"{size / 1e6:>9.2f} MB  {name}" for name, size in largest[:FILES])]
        if rest := largest[FILES:]:
            lines.append(f"{sum(size for _, size in rest) / 1e6:>9.2f} MB  {len(rest)} more files: --json lists them")
        lines += ["", f"made by: {found['command']}", "", *(f"{name}: {text}" for name, text in first.items())]
        lines.append(next_commands(package, target, ready))
    out.result({**found, "summary": first, "here": [asdict(finding) for finding in here]}, *lines)


def _next(found: Found) -> str:
    """The command that a model's files are for."""
    shown = shlex.quote(str(found.path))
    name = os.path.basename(os.path.abspath(found.path)).removesuffix(".gguf")
    made = shlex.quote(f"{name}-package")
    if found.kind == "adapter":
        return f"still-export {shlex.quote(found.base or 'BASE')} --overlay {shown} --to onnx -o {made}"
    try:
        demand_model(str(found.path), "export")
    except NotLinearizedError:
        return f"still-export linearize {shown} -o {shlex.quote(f'{name}-linear')}"
    return f"still-export {shown} --to onnx -o {made}"


def _describe(found: Found, out: Output) -> None:
    """Print the summary of a model's files."""
    from still_export.folders.description import describe_adapter, describe_folder
    from still_export.folders.gguf_description import describe_gguf
    from still_export.folders.model import check_family

    if found.path.is_file():
        summary = describe_gguf(found.path)
    elif found.kind == "adapter":
        summary = describe_adapter(found.folder or found.path)
    else:
        check_family(found.model_type)
        summary = describe_folder(found.folder or found.path)
    summary["next"] = _next(found)
    out.result(summary, *(f"{name}: {line}" for name, line in summary.items()))
