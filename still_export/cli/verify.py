"""still-export verify: prove a package against PyTorch."""

from __future__ import annotations

import json
import shlex
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from still_export.cli.gguf_package import package_of
from still_export.cli.output import Output, ReportFile, TrustNative, command_line, report_folder
from still_export.cli.verify_foreign import is_foreign, verify_foreign
from still_export.cli.verify_served import REQUESTS, RUNTIME, check_flags, verify_served
from still_export.cli.verify_server import is_server, verify_server
from still_export.errors import ConfigError, ModelNotFoundError
from still_export.folders.model import check_model, check_overlay
from still_export.package.folder import open_package
from still_export.sources import demand_package
from still_export.texts.files import read_text

if TYPE_CHECKING:
    from still_export.proof.judged import Report
    from still_export.proof.verdict import Verdict

LOGITS = "logits"
SERVED = "With --runtime vllm"
WITH_BOTH = ("seed", "runtime", "provider")
"""Options that vLLM's proof shares or ignores."""
SHOWN = 5
"""Most mismatches that are printed; the report lists all."""

EXAMPLES = """
Examples:

    still-export verify package

    still-export verify package --lengths 1,65,300 --decode-steps 16 --model /path/to/the/model

    still-export verify package --record calls.npz     and, where there is a GPU and no PyTorch: --calls calls.npz

    still-export verify package --selections chosen.npz     there, first, for a large model; then --record calls.npz --follow chosen.npz

    still-export verify STILL_FOLDER --runtime vllm

    still-export verify http://127.0.0.1:8000 --model FILE     any OpenAI-compatible server, against the file that it serves

    still-export verify GENAI_FOLDER --model BASE     a decoder that onnxruntime-genai, optimum or transformers exported
"""


def verify(
    flags: dict[str, Any],
    subject: Annotated[
        str,
        typer.Argument(
            metavar="PACKAGE",
            help="Package folder or GGUF file; with --runtime vllm a STILL model's folder; or the address of a running server.",
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for report and calls.", show_default="PACKAGE/verify")
    ] = None,
    record: Annotated[
        Path | None, typer.Option(help="Only write PyTorch's answers to this file, for a machine without PyTorch.")
    ] = None,
    selections: Annotated[
        Path | None, typer.Option(help="Only write the runtime's selections to this file, for --record --follow.")
    ] = None,
    choices_file: Annotated[
        Path | None,
        typer.Option(
            "--follow", help="With --record: PyTorch uses the selections in this file, which --selections wrote."
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(min=1, help="Requests in each of three loads.", rich_help_panel=SERVED, show_default="24"),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, float16 or bfloat16.", rich_help_panel=SERVED, show_default="as stored")
    ] = None,
    tensor_parallel_size: Annotated[
        int | None, typer.Option(min=1, help="Devices that share each layer.", rich_help_panel=SERVED, show_default="1")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--as", help="The server's name of the model.", show_default="its only one")
    ] = None,
    report: ReportFile = None,
    junit: Annotated[Path | None, typer.Option(help="Write the verdict on each output as JUnit XML, for CI.")] = None,
    trust_native: TrustNative = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Compare with PyTorch: logits, states and selections of ONNX Runtime or TensorRT, vLLM's answers under load, another exporter's
    decoder, or a running server's answers; exit 1 on a mismatch."""
    engine_flags = {"--requests": requests, "--dtype": dtype, "--tensor-parallel-size": tensor_parallel_size}
    package_flags = {f"--{name.replace('_', '-')}": x for name, x in flags.items() if name not in WITH_BOTH}
    package_flags |= {
        "--record": record,
        "--selections": selections,
        "--follow": choices_file,
        "--report": report,
        "--junit": junit,
    }
    runtime, out = flags.get("runtime"), Output(as_json, quiet)
    if is_server(subject):
        is_set = {
            flag: x is not None
            for flag, x in (engine_flags | package_flags).items()
            if flag not in ("--model", "--lengths")
        } | {f"--{flag}": flag in flags for flag in ("runtime", "provider")}
        is_set |= {"--junit": junit is not None, "--trust-native": trust_native}
        lengths = tuple(flags.get("lengths") or ())
        passed = verify_server(subject, flags.get("model"), name, lengths, output, flags.get("seed", 0), is_set, out)
        raise typer.Exit(0 if passed else 1)
    if not Path(subject).exists():
        demand_package(Path(subject), "verify")
    if flags.get("model") is not None:
        check_model(flags["model"], here=not is_foreign(Path(subject)))
    if flags.get("adapter") is not None:
        check_overlay(flags["adapter"])
    if flags.get("text") is not None:
        read_text(flags["text"])
    if name is not None:
        raise ConfigError("--as names a server's model: give the server's address in the place of the package.")
    package = package_of(Path(subject), out)
    check_flags(
        runtime, *({name: x is not None for name, x in group.items()} for group in (engine_flags, package_flags))
    )
    if runtime == RUNTIME:
        ranks, seed = tensor_parallel_size or 1, flags.get("seed", 0)
        passed = verify_served(package, output, seed, requests or REQUESTS, dtype, ranks, out)
        raise typer.Exit(0 if passed else 1)
    if junit is not None:
        report_folder(junit.parent)
    foreign = is_foreign(package)
    if not foreign:
        demand_package(package, "verify")
    if foreign:
        foreign_flags = {"record": record, "selections": selections, "follow": choices_file, "report": report, **flags}
        raise typer.Exit(0 if verify_foreign(package, output, foreign_flags, out, junit) else 1)
    from still_export.doctor import machine
    from still_export.graph.quantization.policy import rounds_activations
    from still_export.package.staging import staged_files
    from still_export.package.trust import trust_package
    from still_export.proof import package as proof
    from still_export.proof.own_weights import AGAINST, verify_own
    from still_export.report import verify as looks
    from still_export.report.junit import write_junit
    from still_export.report.render import write_report

    written = "--record" if record is not None else "--selections"
    if (file := record or selections) is not None and (report is not None or junit is not None):
        raise ConfigError(
            f"{written} compares nothing, so it has no --report and no --junit; give them where the calls are compared."
        )
    if record is not None and selections is not None:
        raise ConfigError("--selections asks the runtime and --record PyTorch; give one of them.")
    if choices_file is not None and record is None:
        raise ConfigError("--follow is for PyTorch's answers: give it with --record.")
    options = proof.VerifyOptions(**flags)
    opened = open_package(package, check_hashes=False)
    if trust_native:
        trust_package(package)
    folder = (output or package / "verify") if file is None else file.parent

    report_folder(folder)
    own: Verdict | None = None
    with out.phases() as progress:
        if file is not None:
            if record is not None:
                count = proof.record(package, record, options, selections=choices_file, progress=progress)
            else:
                count = proof.select(package, file, options, progress=progress)
            verb = f"still-export verify {shlex.quote(str(package))}"
            name = shlex.quote(str(file))
            more = f"--calls {name}" if record is not None else f"--record CALLS --follow {name}, where PyTorch is"
            out.result(
                {"calls" if record is not None else "selections": str(file)},
                f"{file}: {count} cases",
                f"next: {verb} {more}",
            )
            return
        try:
            found = proof.verify(package, options, folder, progress=progress)
        except ModelNotFoundError as error:
            if options.model is not None or options.calls is not None:
                raise
            own = verify_own(package, options.provider, options.seed, str(error), progress)
    if own is not None:
        verdict = {"passed": own.passed, "against": AGAINST, **own.to_dict()}
        with staged_files(folder) as work:
            (work / "report.json").write_text(json.dumps(verdict, indent=1) + "\n", encoding="utf-8")
        lines = [*map(str, own.checks), *(f"not asked: {line}" for line in own.not_asked)]
        out.result(verdict, *lines, f"{'PASSED' if own.passed else 'FAILED'} {AGAINST}")
        raise typer.Exit(0 if own.passed else 1)
    content, ran, loss = found.to_dict(), found.subject, found.loss
    with staged_files(folder) as work:
        (work / "report.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if as_json:
        out.result(content)
    else:
        rounded = rounds_activations(opened.manifest)
        baseline = (
            "PyTorch's run with activations rounded to 8 bits" if rounded else "PyTorch's own run in the package's type"
        )
        _print(found.report, folder, ran.title, ran.native, baseline, repeatable=options.adapter is None)
        if loss is not None:
            print(loss)
        for line in found.report.not_asked:
            print(f"not asked: {line}")
        print("PASSED" if found.report.passed else "FAILED: the package does not compute what PyTorch computes")
    if junit is not None:
        write_junit(content, package.name, junit)
    if report is not None:
        try:
            write_report(looks.page(content, ran.title, str(package), machine(), command_line()), report)
            out.log(f"report to look at: {report}")
        except Exception as error:  # a plotting library failed: the verdict stands
            out.say(f"the report could not be drawn: {error}")
    raise typer.Exit(0 if found.report.passed else 1)


def _print(report: Report, folder: Path, runtime: str, native: bool, own_run: str, repeatable: bool) -> None:
    """`repeatable`: polygraphy's command can repeat the run, which it cannot with an adapter."""
    console = Console(width=None if Console().is_terminal else 150)
    table = Table(
        title=f"PyTorch against {runtime}: the logits, and the state nearest to its bound; own = mean error of {own_run}"
    )
    for column in ("case", "output", "max error", "mean", "own", "judged", "bound", "of its bound", ""):
        table.add_column(column, justify="left" if column in ("case", "output", "") else "right", no_wrap=True)
    cases = defaultdict(list)
    for entry in report.outputs:
        cases[entry.case].append(entry)
    for case, entries in cases.items():
        states = [e for e in entries if e.output != LOGITS]
        shown = [e for e in entries if e.output == LOGITS]
        shown += [max(states, key=lambda e: (not e.passed, e.of_bound))] if states else []
        for entry in shown:
            numbers = (entry.max_abs, entry.mean_abs, entry.own_mean_abs, entry.worst, entry.bound)
            table.add_row(
                case,
                entry.output.removeprefix("present_"),
                *(f"{number:.1e}" for number in numbers),
                f"{entry.of_bound:.2f}",
                "ok" if entry.passed else "MISMATCH",
            )
    console.print(table)
    for check in report.checks:
        print(check)
    chosen = report.selections
    print(
        f"selections: {chosen.compared} choices compared, {chosen.near_ties} differ by a near tie (rounding turns some "
        f"{chosen.expected:.1f}), {chosen.wrong} differ without one"
    )
    layer = "none" if report.first_diverging_layer is None else str(report.first_diverging_layer)
    for entry in report.mismatches[:SHOWN]:
        print(entry.describe())
    print(f"top-1 agreement: {report.top1:.4f} ({own_run} {report.own_top1:.4f}); first diverging layer: {layer}")
    print(f"report with every output: {folder / 'report.json'}")
    if not repeatable:
        return
    bodies = ", on the function bodies, which run where the kernel is not loaded" if native else ""
    print(f"the same without still-export, as far as single calls show it, under every output's largest bound{bodies}:")
    print(f"  sh {shlex.quote(str(folder / 'polygraphy.sh'))}")
