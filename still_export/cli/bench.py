"""still-export bench: speed and memory of a package."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from still_export.cli.output import Output, PackageFolder, ReportFile, TrustNative, command_line, report_folder
from still_export.errors import ConfigError
from still_export.extras import demand
from still_export.folders.sources import demand_package

if TYPE_CHECKING:
    from still_export.evaluation.bench import Measurement

EXAMPLES = """
Examples:

    still-export bench package

    still-export bench package --lengths 1024,4096,8000 --beside peer.json -o results
"""


def bench(
    flags: dict[str, Any],
    package: PackageFolder,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder for bench.json.", show_default="PACKAGE/bench"),
    ] = None,
    peer_file: Annotated[
        Path | None,
        typer.Option("--beside", help="JSON rows of another runtime, in bench.json's format, to compare and plot."),
    ] = None,
    report: ReportFile = None,
    trust_native: TrustNative = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the measurements as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Measure prefill, decode and peak memory by context length with ONNX Runtime or TensorRT."""
    demand_package(package, "bench")
    from still_export.cli.gguf_package import package_of
    from still_export.doctor import machine
    from still_export.evaluation.bench import LENGTHS, BenchOptions, Measurement, speed_of, to_dict
    from still_export.evaluation.bench import bench as measure
    from still_export.loading.runtimes import runtime_of
    from still_export.package.folder import open_package
    from still_export.package.inspect import state_sizes
    from still_export.package.staging import write_json
    from still_export.package.trust import trust_package
    from still_export.report import bench as looks
    from still_export.report.render import write_report

    out = Output(as_json, quiet)
    package = package_of(package, out)
    opened = open_package(package)
    if trust_native:
        trust_package(package)
    runtime = runtime_of(opened.manifest["target"], flags.get("runtime"))
    demand(*runtime.modules)
    options = BenchOptions(**flags)
    lengths, left_out = options.fitting_lengths(opened.manifest), ""
    if left := sorted(set(LENGTHS) - set(lengths)) if not options.lengths else []:
        left_out = (
            f"left out: {', '.join(map(str, left))} tokens, which with {options.steps} steps exceed the package's capacity of "
            f"{opened.manifest['capacity']['capacity_tokens']}"
        )
        out.log(left_out)
    peer: list[Measurement] = []
    if peer_file is not None:
        try:
            beside = json.loads(peer_file.read_text(encoding="utf-8"))
            peer = [Measurement(**row) for row in (beside["rows"] if isinstance(beside, dict) else beside)]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"{peer_file} has no measurements: {error}. Give a file that `bench` or tools.benchmarks.peer wrote."
            ) from error
    folder = report_folder(output or package / "bench")
    with out.bar("measuring", len(lengths)) as progress:
        rows = measure(package, options, progress)
    content = {
        "package": str(package),
        "threads": options.threads,
        "batch": options.batch,
        "runtime": runtime.name,
        "provider": options.provider,
        "machine": machine()["processor"],
        "state": state_sizes(opened.manifest),
        **speed_of(rows),
        "beside": to_dict(peer),
    }
    write_json(folder / "bench.json", content)
    if report is not None:
        write_report(looks.page(content, left_out, machine(), command_line()), report)
        out.log(f"report to look at: {report}")
    out.result(content, *table(rows, peer), f"results: {folder / 'bench.json'}")


def table(rows: Sequence[Measurement], peer: Sequence[Measurement] = ()) -> list[str]:
    """Lines of a terminal: a row per length, then rounds and the load of the machine."""
    from still_export.evaluation.bench import load_of

    lines = [f"{'tokens':>8} {'prefill':>16} {'decode, a token':>18} {'peak memory':>12}"]
    others = {row.length: row for row in peer}
    for row in rows:
        prefill, decode = (
            "" if spread is None else f" ±{spread:>4.0%}" for spread in (row.prefill_spread, row.decode_spread)
        )
        line = f"{row.length:>8} {f'{row.prefill_s:.2f} s{prefill}':>16} {f'{row.decode_ms:.1f} ms{decode}':>18} "
        line += f"{f'{row.peak_mb:.0f} MB':>12}"
        if other := others.get(row.length):
            ratios = (row.prefill_s / other.prefill_s, row.decode_ms / other.decode_ms, row.peak_mb / other.peak_mb)
            line += "   ratio to the other: prefill {:.2f}, decode {:.2f}, peak {:.2f}".format(*ratios)
        lines.append(line)
    rounds = {row.rounds for row in rows}
    how = "one round" if rounds == {1} else f"medians of {max(rounds, default=1)} rounds, ± half of their range"
    return [*lines, f"{how}; {load_of(rows)}"]
