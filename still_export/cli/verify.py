"""still-export verify: prove a package against PyTorch."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from still_export.cli.output import Output
from still_export.errors import ConfigError, PackageError

if TYPE_CHECKING:
    from still_export.verify import Report

EXAMPLES = """
Examples:

    still-export verify package

    still-export verify package --lengths 1,65,300 --decode-steps 16 --model /path/to/the/model
"""


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command("verify", epilog=EXAMPLES)(verify)


def verify(
    package: Annotated[Path, typer.Argument(help="Package folder.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for report and calls.", show_default="PACKAGE/verify")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The PyTorch model, if it is no longer where it was exported from.")
    ] = None,
    lengths: Annotated[str | None, typer.Option(help="Prompt lengths.", show_default="1,63,...,4097")] = None,
    decode_steps: Annotated[
        int | None, typer.Option(help="Single-token steps after a prefill.", show_default="72")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the prompts.")] = 0,
    runtime: Annotated[str | None, typer.Option(help="ort or trt.", show_default="the package's target")] = None,
    plugin: Annotated[Path | None, typer.Option(help="trt: plugin library in the place of the package's.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Compare ONNX Runtime or TensorRT with PyTorch on logits, every state tensor and every selection; exit 1 on a mismatch."""
    from dataclasses import replace

    from still_export.onnx_package import ExportOptions, load_source
    from still_export.package import open_package
    from still_export.targets import OrtTarget, TrtTarget
    from still_export.verify import DECODE_STEPS, LENGTHS, Verifier

    try:
        wanted = tuple(int(n) for n in lengths.split(",")) if lengths else LENGTHS
    except ValueError:
        raise ConfigError(f"--lengths {lengths}: give numbers separated by commas, such as 1,64,1000.") from None
    if min(wanted) < 1:
        raise ConfigError(f"--lengths {lengths}: a prompt has at least one token.")
    opened = open_package(package)
    options = ExportOptions.from_manifest(opened.manifest)
    out = Output(as_json, quiet)
    kind = opened.manifest.get("target", "onnx")
    runtime = runtime or ("ort" if kind == "onnx" else kind)
    if runtime not in ("ort", "trt") or (runtime == "ort") != (kind == "onnx"):
        raise ConfigError(
            f"a package for {kind} is not verified with --runtime {runtime}; ort runs onnx, trt runs trt."
        )
    if runtime == "trt":
        if not opened.manifest["engines"]:
            raise PackageError(f"{package} has no engine yet. Build it on this machine: still-export build {package}")
        options = replace(options, dtype="float32")  # half precision is held to what float32 computes
    target = OrtTarget(opened) if runtime == "ort" else TrtTarget(opened, plugin)
    source = load_source(replace(options, model=model) if model else options)
    steps = DECODE_STEPS if decode_steps is None else decode_steps
    verifier = Verifier(opened, source, wanted, steps, seed, target)
    folder = output or package / "verify"
    with out.bar("verifying", verifier.case_count) as progress:
        report = verifier.run(folder, progress)
    (folder / "report.json").write_text(json.dumps(report.to_dict(), indent=1) + "\n", encoding="utf-8")
    if as_json:
        out.result(report.to_dict())
    else:
        _print(report, folder, target.title)
    raise typer.Exit(0 if report.passed else 1)


def _print(report: Report, folder: Path, runtime: str) -> None:
    console = Console(width=None if Console().is_terminal else 120)
    table = Table(title=f"PyTorch against {runtime}: errors of the logits, and of the worst state tensor")
    for column in ("case", "logits max", "mean", "cosine", "states max", "mean", "cosine", "worst state", ""):
        table.add_column(column, justify="left" if column in ("case", "worst state") else "right", no_wrap=True)
    cases = defaultdict(list)
    for entry in report.outputs:
        cases[entry.case].append(entry)
    for case, entries in cases.items():
        logits = next(e for e in entries if e.output == "logits")
        states = [e for e in entries if e.output != "logits"]
        worst = max(states, key=lambda e: (not e.passed, e.max_abs))
        table.add_row(
            case,
            f"{logits.max_abs:.1e}",
            f"{logits.mean_abs:.1e}",
            f"{logits.cosine:.7f}",
            f"{worst.max_abs:.1e}",
            f"{sum(e.mean_abs for e in states) / len(states):.1e}",
            f"{min(e.cosine for e in states):.7f}",
            worst.output.removeprefix("present_") if worst.max_abs else "-",
            "ok" if all(e.passed for e in entries) else "MISMATCH",
        )
    console.print(table)
    chosen = report.selections
    print(
        f"selections: {chosen.compared} salient rows compared, {chosen.near_ties} differ by a near tie, "
        f"{chosen.wrong} differ without one"
    )
    layer = "none" if report.first_diverging_layer is None else str(report.first_diverging_layer)
    print(f"top-1 agreement: {report.top1:.4f}; first diverging layer: {layer}")
    print(f"report with every output: {folder / 'report.json'}")
    print(f"the same verdict without still-export:\n  {report.command}")
    print("PASSED" if report.passed else "FAILED: the package does not compute what PyTorch computes")
