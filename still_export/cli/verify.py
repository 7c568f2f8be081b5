"""still-export verify: prove a package against PyTorch."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from still_export.cli.gguf_package import package_of
from still_export.cli.output import Output, ReportFile, TrustNative, command_line, report_folder
from still_export.cli.verify_foreign import is_foreign, verify_foreign
from still_export.cli.verify_served import REQUESTS, RUNTIME, check_flags, verify_served
from still_export.cli.verify_server import is_server, verify_server
from still_export.errors import ConfigError, ModelNotFoundError
from still_export.folders.model import check_model, check_overlay
from still_export.folders.sources import demand_package
from still_export.package.folder import open_package
from still_export.texts.files import read_text

if TYPE_CHECKING:
    from still_export.proof.inputs import Input
    from still_export.proof.judge import Report
    from still_export.proof.verdict import Verdict

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
    from still_export.package.staging import write_json
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
    open_package(package, check_hashes=False)
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
            own = verify_own(package, options.provider, options.seed or 0, str(error), progress)
    if own is not None:
        verdict = {"passed": own.passed, "against": AGAINST, **own.to_dict()}
        write_json(folder / "report.json", verdict)
        outcome = f"{'PASSED' if own.passed else 'FAILED'} {AGAINST}"
        out.result(verdict, outcome, *(f"not asked: {line}" for line in own.not_asked), *map(str, own.checks))
        raise typer.Exit(0 if own.passed else 1)
    content, ran, loss = found.to_dict(), found.subject, found.loss
    write_json(folder / "report.json", content)
    if as_json:
        out.result(content)
    else:
        print(
            *lines(found.report, folder, None if loss is None else str(loss), options.adapter is None, found.inputs),
            sep="\n",
        )
    if junit is not None:
        write_junit(content, package.name, junit)
    if report is not None:
        try:
            write_report(looks.page(content, ran.title, str(package), machine(), command_line()), report)
            out.log(f"report to look at: {report}")
        except Exception as error:  # a plotting library failed: the verdict stands
            out.say(f"the report could not be drawn: {error}")
    raise typer.Exit(0 if found.report.passed else 1)


def lines(
    report: Report, folder: Path, loss: str | None, repeatable: bool, inputs: Sequence[Input] = ()
) -> Iterator[str]:
    """The verdict for people: the verdict first, then what was not asked, then what is nearest to its bound.

    Args:
        loss: What the bits cost.
        repeatable: Polygraphy's command can repeat the run, which it cannot with an adapter.
        inputs: What the reference was read from.
    """
    yield report.verdict
    yield from map(str, inputs)
    yield from (f"not asked: {line}" for line in report.not_asked)
    failed = [check for check in report.checks if not check.passed]
    if (nearest := report.nearest) is not None:
        yield f"{'furthest' if report.mismatches else 'nearest to its bound'}: {nearest.describe()} ({nearest.of_bound:.0%} of it)"
    for entry in report.mismatches[1:SHOWN]:
        yield f"also off: {entry.describe()}"
    if more := report.mismatches[SHOWN:]:
        yield f"and {len(more)} more outputs"
    yield from map(str, failed)
    chosen = report.selections
    if chosen.wrong:
        yield f"selections: {chosen.wrong} of {chosen.compared} differ without a near tie"
    if report.first_diverging_layer is not None:
        yield f"first diverging layer: {report.first_diverging_layer}"
    yield f"{len(report.outputs):,} outputs compared, {len(report.checks) - len(failed)} of {len(report.checks)} checks hold"
    yield from (f"asked of the {line}" for line in report.asked)
    if chosen.compared:
        yield f"selections: {chosen.compared:,} compared, {chosen.near_ties} differ by a near tie"
    yield f"top-1 agreement: {report.top1:.4f} (PyTorch's own run {report.own_top1:.4f})"
    if loss is not None:
        yield loss
    yield f"report with every output: {folder / 'report.json'}"
    if repeatable and report.command:
        yield f"single calls by polygraphy: {report.command}"
