"""still-export verify: prove a package against PyTorch."""

from __future__ import annotations

import json
import shlex
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from still_export.cli.output import Output, ReportFile, TrustNative, command_line, report_folder
from still_export.cli.verify_served import REQUESTS, RUNTIME, check_flags, verify_served
from still_export.errors import ConfigError, ModelNotFoundError, PackageError
from still_export.extras import demand

if TYPE_CHECKING:
    from still_export.graph.options import ExportOptions
    from still_export.models.weights import Pair
    from still_export.package.folder import Package
    from still_export.proof.cases import CaseSource
    from still_export.proof.verify import Report

SHOWN = 5
"""Mismatches that are printed; the report has all."""

EXAMPLES = """
Examples:

    still-export verify package

    still-export verify package --lengths 1,65,300 --decode-steps 16 --model /path/to/the/model

    still-export verify package --record calls.npz     and, where there is a GPU and no PyTorch: --calls calls.npz

    still-export verify STILL_FOLDER --runtime vllm
"""


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command("verify", epilog=EXAMPLES)(verify)


def verify(
    package: Annotated[Path, typer.Argument(help="Package folder; with --runtime vllm a STILL model's folder.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for report and calls.", show_default="PACKAGE/verify")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The PyTorch model, if it is no longer where it was exported from.")
    ] = None,
    lengths: Annotated[str | None, typer.Option(help="Prompt lengths.", show_default="1,63,...,4097")] = None,
    decode_steps: Annotated[
        int | None, typer.Option(min=1, help="Single-token steps after a prefill.", show_default="72; trt: 256")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the prompts.")] = 0,
    runtime: Annotated[
        str | None, typer.Option(help="ort, trt, torch or vllm.", show_default="the package's target")
    ] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help="vllm: requests of each of three loads.", show_default="24")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="vllm: float32, float16 or bfloat16.", show_default="as stored")
    ] = None,
    tensor_parallel_size: Annotated[
        int | None, typer.Option(min=1, help="vllm: devices that share each layer.", show_default="1")
    ] = None,
    provider: Annotated[str, typer.Option(help="Of ONNX Runtime: cpu or cuda.")] = "cpu",
    plugin: Annotated[Path | None, typer.Option(help="trt: plugin library in the place of the package's.")] = None,
    adapter: Annotated[
        Path | None, typer.Option(help="LoRA adapter to run a package with that was exported with --adapters.")
    ] = None,
    record: Annotated[
        Path | None, typer.Option(help="Only write PyTorch's answers to this file, for a machine without PyTorch.")
    ] = None,
    calls: Annotated[Path | None, typer.Option(help="Take PyTorch's answers from a file made with --record.")] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="Quantized packages: a text to tell the price of quantization on, in bits per byte."),
    ] = None,
    reference_device: Annotated[
        str | None, typer.Option(help="Where PyTorch answers: cpu or cuda.", show_default="cpu")
    ] = None,
    report: ReportFile = None,
    junit: Annotated[Path | None, typer.Option(help="Write the verdict on every output as JUnit XML, for CI.")] = None,
    trust_native: TrustNative = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Compare ONNX Runtime or TensorRT with PyTorch on logits, every state tensor and every selection, or vLLM's answers under load
    with PyTorch's; exit 1 on a mismatch."""
    ours = {"--requests": requests, "--dtype": dtype, "--tensor-parallel-size": tensor_parallel_size}
    others = {"--model": model, "--lengths": lengths, "--decode-steps": decode_steps, "--plugin": plugin}
    others |= {"--record": record, "--calls": calls, "--text": text, "--report": report, "--junit": junit}
    others |= {"--adapter": adapter, "--reference-device": reference_device}
    check_flags(runtime, *({name: x is not None for name, x in flags.items()} for flags in (ours, others)))
    if runtime == RUNTIME:
        ranks = tensor_parallel_size or 1
        passed = verify_served(package, output, seed, requests or REQUESTS, dtype, ranks, Output(as_json, quiet))
        raise typer.Exit(0 if passed else 1)
    from still_export.doctor import machine
    from still_export.graph.quantization.policy import rounds_activations
    from still_export.package.folder import open_package
    from still_export.package.staging import staged_files
    from still_export.package.trust import trust_package
    from still_export.proof.recorded import RecordedCases, record_cases
    from still_export.proof.reference import runtime_of
    from still_export.proof.sessions import Target
    from still_export.proof.verify import Verifier, check_dtype
    from still_export.report import verify as looks
    from still_export.report.junit import junit as junit_report
    from still_export.report.render import check_report, write_report
    from still_export.runtime.cuda_driver import CudaError
    from still_export.runtime.sampling import RunError
    from still_export.targets.registry import target_of

    if record is not None and (report is not None or junit is not None):
        raise ConfigError(
            "--record compares nothing, so it has no --report and no --junit; give them where the calls are compared."
        )
    if report is not None:
        check_report(report)
    if junit is not None:
        report_folder(junit.parent)
    if adapter is not None and (record is not None or calls is not None):
        raise ConfigError("--adapter is compared where PyTorch answers: give it without --record and --calls.")
    if record is not None and calls is not None:
        raise ConfigError("--record writes a file of answers and --calls reads one; give one of them.")
    if reference_device is not None and calls is not None:
        raise ConfigError("--calls is what PyTorch answered already: leave out --reference-device.")
    try:
        wanted = None if lengths is None else tuple(int(x) for x in lengths.split(","))
    except ValueError:
        raise ConfigError(f"--lengths {lengths}: give numbers separated by commas.") from None
    opened, out = open_package(package), Output(as_json, quiet)
    if trust_native:
        trust_package(package)
    kind = opened.manifest["target"]
    genai = kind == "genai" and runtime is None and record is None
    if genai:
        demand("onnxruntime_genai")
    runtime = runtime_of(kind, runtime)
    check_dtype(opened)
    quantized = opened.manifest.get("quantization") is not None
    if text is not None and (not quantized or calls is not None or record is not None):
        raise ConfigError(
            "--text tells the price of quantization: give it with a quantized package, without --record and --calls."
        )
    _check_lengths(wanted or (), opened)
    if runtime == "trt" and record is None and not opened.manifest["engines"]:
        raise PackageError(f"{package} has no engine yet. Build it on this machine: still-export build {package}")
    folder = report_folder((output or package / "verify") if record is None else record.parent)
    steps = target_of(kind).decode_steps if decode_steps is None else decode_steps
    pairs: Mapping[str, tuple[Pair, ...]] = {}
    added: dict[str, Any] = {}
    if adapter is not None:
        from still_export.runtime.adapters import adapter_inputs, read_pairs

        pairs, added = read_pairs(adapter, opened.manifest), adapter_inputs(adapter, opened.manifest)
    cases: CaseSource
    if calls is None:
        cases = _torch_cases(opened, model, wanted, steps, seed, pairs, reference_device or "cpu")
    else:
        cases = RecordedCases(calls, opened)
    if record is not None:
        with out.bar("recording", cases.count) as progress:
            record_cases(cases, opened, record, progress)
        out.result(
            {"calls": str(record)},
            f"{record}: {cases.count} cases",
            f"next: still-export verify {shlex.quote(str(package))} --calls {shlex.quote(str(record))}",
        )
        return
    target = Target(opened, runtime, provider, plugin, added, genai)
    try:
        with out.bar("verifying", cases.count) as progress:
            found = Verifier(opened, cases, target, steps).run(folder, progress)
    except (RunError, CudaError) as error:
        raise PackageError(str(error)) from error
    content = found.to_dict()
    price = None
    if quantized and calls is None:
        from still_export.proof.quantized import price_of

        price = price_of(_options(opened, model, "float32"), package, opened.manifest, text)
        content["price"] = price.to_dict()
    with staged_files(folder) as work:
        (work / "report.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if junit is not None:
        with staged_files(junit.parent) as work:
            (work / junit.name).write_text(junit_report(content, package.name), encoding="utf-8")
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
        _print(found, folder, target.title, target.native, own, repeatable=adapter is None)
        if price is not None:
            print(price)
        print("PASSED" if found.passed else "FAILED: the package does not compute what PyTorch computes")
    raise typer.Exit(0 if found.passed else 1)


def _check_lengths(lengths: tuple[int, ...], package: Package) -> None:
    """Raise ConfigError for prompts that the package cannot hold; of the lengths not asked for, those are left out."""
    capacity = package.manifest["capacity"]
    limit = capacity["capacity_tokens"] if capacity["bounded"] else max(lengths, default=1)
    for length in lengths:
        if not 1 <= length <= limit:
            raise ConfigError(f"--lengths {length} is outside 1..{limit}, the capacity of {package.path}.")


def _torch_cases(
    package: Package,
    model: str | None,
    lengths: tuple[int, ...] | None,
    steps: int,
    seed: int,
    pairs: Mapping[str, tuple[Pair, ...]],
    device: str,
) -> CaseSource:
    """Cases answered by PyTorch with the package's weights, and an adapter's `pairs`, in a wider type than the package's: float64 beside
    PyTorch's own float32 run, float32 beside its run in half precision or with activations of 8 bits. A package in float32 with caches in
    8 bits is held to half precision: where a number lies between two codes the last bit decides, and what follows differs by a step.

    Raises:
        ConfigError: PyTorch has no such `device` here.
    """
    import torch

    from still_export.graph.quantization.policy import rounds_activations
    from still_export.graph.quantization.read import held_names, held_source, round_activations
    from still_export.mixers.excuses import excuses_of
    from still_export.proof.layerwise import LayerwiseModel
    from still_export.proof.torch_cases import LENGTHS, TorchCases

    if device not in ("cpu", "cuda"):
        raise ConfigError(f"--reference-device {device} is unknown; known: cpu, cuda.")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--reference-device cuda: PyTorch finds no such device here. Leave it out: the CPU answers.")
    dtype, rounded = package.manifest["model"]["dtype"], rounds_activations(package.manifest)
    if dtype == "float32" and any(state["dtype"] == "int32" for state in package.manifest["states"]):
        dtype = "float16"
    manifest = package.manifest
    try:
        wide, own = (
            held_source(_options(package, model, kind), package.path, manifest, pairs) for kind in ("float32", dtype)
        )
    except ModelNotFoundError as error:
        raise ModelNotFoundError(
            f"{error} The package was exported from it; if the model lies elsewhere now, name it with --model."
        ) from error

    def round_inputs(model: Any) -> None:
        round_activations(model, held_names(package.path), manifest["quantization"]["block_size"])

    exact = None if rounded or dtype != "float32" else torch.float64
    reference = LayerwiseModel(manifest, wide, device=device, dtype=exact)
    beside = LayerwiseModel(manifest, own, excuses_of(manifest).alike, round_inputs if rounded else None, device)
    return TorchCases(manifest, reference, beside, lengths or LENGTHS, steps, seed)


def _options(package: Package, model: str | None, dtype: str) -> ExportOptions:
    """What was exported, in `dtype`, read from where `model` lies now."""
    from dataclasses import replace

    from still_export.graph.options import ExportOptions

    options = ExportOptions.from_manifest(package.manifest)
    return replace(options, model=model or options.model, dtype=dtype)


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
    print(
        f"selections: {chosen.compared} choices compared, {chosen.near_ties} differ by a near tie (expected: at most some "
        f"{chosen.expected:.1f}{': TOO MANY' if chosen.too_many else ''}), {chosen.wrong} differ without one"
    )
    layer = "none" if report.first_diverging_layer is None else str(report.first_diverging_layer)
    for entry in [e for e in report.outputs if not e.passed][:SHOWN]:
        part = "median error of head" if entry.by_median else f"call {entry.worst_call}, error of row"
        place = f"{entry.case}, {entry.output}: {part} {list(entry.worst_place)}"
        print(f"{place} {entry.worst:.1e}, bound {entry.bound:.1e}")
    print(f"top-1 agreement: {report.top1:.4f} ({own_run} {report.own_top1:.4f}); first diverging layer: {layer}")
    print(f"report with every output: {folder / 'report.json'}")
    if not repeatable:
        return
    bodies = ", on the function bodies, which run where the kernel is not loaded" if native else ""
    print(f"the same without still-export, as far as single calls show it, under every output's largest bound{bodies}:")
    print(f"  sh {shlex.quote(str(folder / 'polygraphy.sh'))}")
