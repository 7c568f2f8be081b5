"""still-export bench: speed and memory of a package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from still_export.cli.output import Output, ReportFile, TrustNative, command_line, report_folder
from still_export.errors import ConfigError
from still_export.extras import demand

EXAMPLES = """
Examples:

    still-export bench package

    still-export bench package --lengths 1024,4096,8000 --beside peer.json -o results
"""


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command("bench", epilog=EXAMPLES)(bench)


def bench(
    package: Annotated[Path, typer.Argument(help="Package folder.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder for bench.json.", show_default="PACKAGE/bench"),
    ] = None,
    lengths: Annotated[str | None, typer.Option(help="Context lengths.", show_default="1024,4096,8000")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Decode steps per length.")] = 24,
    threads: Annotated[int, typer.Option(min=0, help="0 = OMP_NUM_THREADS, or the runtime's choice.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Rows at once.")] = 1,
    runtime: Annotated[str | None, typer.Option(help="ort, trt or torch.", show_default="the package's target")] = None,
    provider: Annotated[str, typer.Option(help="Of ONNX Runtime: cpu or cuda.")] = "cpu",
    beside: Annotated[
        Path | None, typer.Option(help="JSON rows of another runtime (bench-peer) to compare and plot with.")
    ] = None,
    report: ReportFile = None,
    trust_native: TrustNative = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the measurements as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Measure prefill, decode and peak memory by context length with ONNX Runtime or TensorRT."""
    from still_export.doctor import machine
    from still_export.evaluation.bench import LENGTHS, Measurement, Setting, to_dict
    from still_export.evaluation.bench import bench as measure
    from still_export.package.folder import open_package
    from still_export.package.staging import staged_files
    from still_export.package.trust import trust_package
    from still_export.proof.reference import runtime_of
    from still_export.report import bench as looks
    from still_export.report.render import check_report, write_report

    if report is not None:
        check_report(report)
    opened = open_package(package)
    if trust_native:
        trust_package(package)
    runtime = runtime_of(opened.manifest["target"], runtime)
    demand(*(["onnxruntime"] if runtime == "ort" else []))
    try:
        wanted = tuple(int(n) for n in lengths.split(",")) if lengths else LENGTHS
    except ValueError:
        raise ConfigError(f"--lengths {lengths}: give numbers separated by commas.") from None
    capacity, out = opened.manifest["capacity"], Output(as_json, quiet)
    setting = Setting(steps, threads, batch, runtime, provider)
    left_out = ""
    if lengths is None and capacity["bounded"]:
        held = tuple(n for n in wanted if setting.room(n) <= capacity["capacity_tokens"])
        if left := sorted(set(wanted) - set(held)):
            left_out = (
                f"left out: {', '.join(map(str, left))} tokens, which with {steps} steps exceed the package's capacity of "
                f"{capacity['capacity_tokens']}"
            )
            out.log(left_out)
        wanted = held
    peer: list[Measurement] = []
    if beside is not None:
        try:
            peer = [Measurement(**row) for row in json.loads(beside.read_text(encoding="utf-8"))]
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"{beside} holds no measurements: {error}.") from error
    folder = report_folder(output or package / "bench")
    with out.bar("measuring", len(wanted)) as progress:
        rows = measure(package, wanted, setting, progress)
    content = {
        "package": str(package),
        "threads": threads,
        "batch": batch,
        "runtime": runtime,
        "provider": provider,
        "rows": to_dict(rows),
        "beside": to_dict(peer),
    }
    with staged_files(folder) as work:
        (work / "bench.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if report is not None:
        write_report(looks.page(content, left_out, machine(), command_line()), report)
        out.log(f"report to look at: {report}")
    out.result(content, *_lines(rows, peer), f"results: {folder / 'bench.json'}")


def _lines(rows: list, peer: list) -> list[str]:
    lines = [f"{'context':>8} {'prefill':>10} {'decode':>12} {'peak':>9}"]
    others = {row.length: row for row in peer}
    for row in rows:
        line = f"{row.length:>8} {row.prefill_s:>8.2f} s {row.decode_ms:>9.1f} ms {row.peak_mb:>6.0f} MB"
        if other := others.get(row.length):
            ratios = (row.prefill_s / other.prefill_s, row.decode_ms / other.decode_ms, row.peak_mb / other.peak_mb)
            line += "   ratio to the other: prefill {:.2f}, decode {:.2f}, peak {:.2f}".format(*ratios)
        lines.append(line)
    return lines
