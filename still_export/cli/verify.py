"""still-export verify: prove a package against PyTorch."""

from __future__ import annotations

import contextlib
import json
import shlex
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from still_export.cli.gguf_package import package_of
from still_export.cli.output import Output, ReportFile, TrustNative, command_line, report_folder
from still_export.cli.verify_foreign import is_foreign, verify_foreign
from still_export.cli.verify_served import REQUESTS, RUNTIME, check_flags, verify_served
from still_export.errors import ConfigError
from still_export.package.folder import open_package

if TYPE_CHECKING:
    from still_export.proof.verify import Report

SERVED = "With --runtime vllm"
WITH_BOTH = ("seed", "runtime", "provider")
"""Fields of the options that vLLM's proof has, too, or lets pass."""
SHOWN = 5
"""Mismatches that are printed; the report has all."""

EXAMPLES = """
Examples:

    still-export verify package

    still-export verify package --lengths 1,65,300 --decode-steps 16 --model /path/to/the/model

    still-export verify package --record calls.npz     and, where there is a GPU and no PyTorch: --calls calls.npz

    still-export verify package --selections chosen.npz     there first, of a large model; then --record calls.npz --follow chosen.npz

    still-export verify STILL_FOLDER --runtime vllm

    still-export verify GENAI_FOLDER --model BASE     a decoder that onnxruntime-genai, optimum or transformers exported
"""


def verify(
    asked: dict[str, Any],
    package: Annotated[
        Path, typer.Argument(help="Package folder or GGUF file; with --runtime vllm a STILL model's folder.")
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for report and calls.", show_default="PACKAGE/verify")
    ] = None,
    record: Annotated[
        Path | None, typer.Option(help="Only write PyTorch's answers to this file, for a machine without PyTorch.")
    ] = None,
    selections: Annotated[
        Path | None, typer.Option(help="Only write what the runtime selects to this file, for --record --follow.")
    ] = None,
    follow: Annotated[
        Path | None, typer.Option(help="With --record: PyTorch selects what --selections wrote to this file.")
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(min=1, help="Requests of each of three loads.", rich_help_panel=SERVED, show_default="24"),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, float16 or bfloat16.", rich_help_panel=SERVED, show_default="as stored")
    ] = None,
    tensor_parallel_size: Annotated[
        int | None, typer.Option(min=1, help="Devices that share each layer.", rich_help_panel=SERVED, show_default="1")
    ] = None,
    report: ReportFile = None,
    junit: Annotated[Path | None, typer.Option(help="Write the verdict on every output as JUnit XML, for CI.")] = None,
    trust_native: TrustNative = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Compare ONNX Runtime or TensorRT with PyTorch on logits, every state tensor and every selection, or vLLM's answers under load
    with PyTorch's, or another exporter's decoder with its model; exit 1 on a mismatch."""
    ours = {"--requests": requests, "--dtype": dtype, "--tensor-parallel-size": tensor_parallel_size}
    others = {f"--{name.replace('_', '-')}": x for name, x in asked.items() if name not in WITH_BOTH}
    others |= {"--record": record, "--selections": selections, "--follow": follow, "--report": report, "--junit": junit}
    runtime, out = asked.get("runtime"), Output(as_json, quiet)
    package = package_of(package, out)
    check_flags(runtime, *({name: x is not None for name, x in flags.items()} for flags in (ours, others)))
    if runtime == RUNTIME:
        ranks, seed = tensor_parallel_size or 1, asked.get("seed", 0)
        passed = verify_served(package, output, seed, requests or REQUESTS, dtype, ranks, out)
        raise typer.Exit(0 if passed else 1)
    if junit is not None:
        report_folder(junit.parent)
    if is_foreign(package):
        flags = {"record": record, "selections": selections, "follow": follow, "report": report, **asked}
        raise typer.Exit(0 if verify_foreign(package, output, flags, out, junit) else 1)
    from still_export.doctor import machine
    from still_export.graph.quantization.policy import rounds_activations
    from still_export.package.staging import staged_files
    from still_export.package.trust import trust_package
    from still_export.proof import package as proof
    from still_export.report import verify as looks
    from still_export.report.junit import write_junit
    from still_export.report.render import check_report, write_report

    written = "--record" if record is not None else "--selections"
    if (file := record or selections) is not None and (report is not None or junit is not None):
        raise ConfigError(
            f"{written} compares nothing, so it has no --report and no --junit; give them where the calls are compared."
        )
    if record is not None and selections is not None:
        raise ConfigError("--selections asks the runtime and --record PyTorch; give one of them.")
    if follow is not None and record is None:
        raise ConfigError("--follow is for PyTorch's answers: give it with --record.")
    if report is not None:
        check_report(report)
    options = proof.VerifyOptions(**asked)
    opened = open_package(package, check_hashes=False)
    if trust_native:
        trust_package(package)
    folder = (output or package / "verify") if file is None else file.parent

    def started(cases: int) -> Callable[[str], None]:
        report_folder(folder)
        return bar.enter_context(out.bar("verifying" if file is None else "recording", cases))

    with contextlib.ExitStack() as bar:
        if file is not None:
            if record is not None:
                count = proof.record(package, record, options, follow=follow, started=started)
            else:
                count = proof.select(package, file, options, started=started)
            bar.close()
            verb = f"still-export verify {shlex.quote(str(package))}"
            name = shlex.quote(str(file))
            more = f"--calls {name}" if record is not None else f"--record CALLS --follow {name}, where PyTorch is"
            out.result(
                {"calls" if record is not None else "selections": str(file)},
                f"{file}: {count} cases",
                f"next: {verb} {more}",
            )
            return
        found = proof.verify(package, options, folder, started=started)
    content, target, loss = found.to_dict(), found.target, found.loss
    with staged_files(folder) as work:
        (work / "report.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if junit is not None:
        write_junit(content, package.name, junit)
    if report is not None:
        write_report(looks.page(content, target.title, str(package), machine(), command_line()), report)
        out.log(f"report to look at: {report}")
    if as_json:
        out.result(content)
    else:
        rounded = rounds_activations(opened.manifest)
        own = (
            "PyTorch's run with activations rounded to 8 bits" if rounded else "PyTorch's own run in the package's type"
        )
        _print(found.report, folder, target.title, target.native, own, repeatable=options.adapter is None)
        if loss is not None:
            print(loss)
        if found.advice:
            print(found.advice)
        print("PASSED" if found.report.passed else "FAILED: the package does not compute what PyTorch computes")
    raise typer.Exit(0 if found.report.passed else 1)


def _print(report: Report, folder: Path, runtime: str, native: bool, own_run: str, repeatable: bool) -> None:
    """`repeatable`: by polygraphy's command, which can give no adapter."""
    console = Console(width=None if Console().is_terminal else 150)
    title = f"errors of the logits, and of the worst state tensor; own = {own_run}"
    table = Table(title=f"PyTorch against {runtime}: {title}")
    columns = ["case", "logits max", "mean", "own", "cosine", "states max", "mean", "own", "cosine", "worst state", ""]
    for column in columns:
        table.add_column(column, justify="left" if column in ("case", "worst state") else "right", no_wrap=True)
    cases = defaultdict(list)
    for entry in report.outputs:
        cases[entry.case].append(entry)
    for case, entries in cases.items():
        logits = next(e for e in entries if e.output == "logits")
        states = [e for e in entries if e.output != "logits"]
        worst = max(states, key=lambda e: (not e.passed, e.worst / e.bound if e.bound else e.max_abs))
        mean, own = (sum(getattr(e, name) for e in states) / len(states) for name in ("mean_abs", "own_mean_abs"))
        table.add_row(
            case,
            f"{logits.max_abs:.1e}",
            f"{logits.mean_abs:.1e}",
            f"{logits.own_mean_abs:.1e}",
            f"{logits.cosine:.7f}",
            f"{worst.max_abs:.1e}",
            f"{mean:.1e}",
            f"{own:.1e}",
            f"{min(e.cosine for e in states):.7f}",
            worst.output.removeprefix("present_") if worst.max_abs else "-",
            "ok" if all(e.passed for e in entries) else "MISMATCH",
        )
    console.print(table)
    for check in report.checks:
        print(f"{check.name}: " + ("yes" if check.passed else f"NO, {check.detail}"))
    chosen = report.selections
    untold = (
        f"; {chosen.untold} tokens with a near tie that the runtime does not tell: their logits, and what later layers keep of "
        "them, are not held"
        if chosen.untold
        else ""
    )
    print(
        f"selections: {chosen.compared} choices compared, {chosen.near_ties} differ by a near tie (expected: at most some "
        f"{chosen.expected:.1f}{': TOO MANY' if chosen.too_many else ''}), {chosen.wrong} differ without one{untold}"
    )
    layer = "none" if report.first_diverging_layer is None else str(report.first_diverging_layer)
    for entry in report.mismatches[:SHOWN]:
        print(entry.told())
    print(f"top-1 agreement: {report.top1:.4f} ({own_run} {report.own_top1:.4f}); first diverging layer: {layer}")
    print(f"report with every output: {folder / 'report.json'}")
    if not repeatable:
        return
    bodies = ", on the function bodies, which run where the kernel is not loaded" if native else ""
    print(f"the same without still-export, as far as single calls show it, under every output's largest bound{bodies}:")
    print(f"  sh {shlex.quote(str(folder / 'polygraphy.sh'))}")
