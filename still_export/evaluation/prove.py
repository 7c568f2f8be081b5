"""Prove a package as far as this machine can: build engines, compare with PyTorch, measure, record."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from still_export.errors import ModelNotFoundError, PackageError
from still_export.evaluation.bench import LENGTHS, BenchOptions, bench, speed_of
from still_export.extras import demand
from still_export.loading.runtimes import runtime_of
from still_export.options import option
from still_export.package.folder import Package, open_package
from still_export.proof.judge import Report
from still_export.proof.package import VerifyOptions, VerifyResult, verify
from still_export.proof.records import Record, make_record, what_ran
from still_export.targets.registry import packaged_target

SHOWN = 5
"""Mismatches listed in a record."""


@dataclass(frozen=True)
class ProveOptions:
    """Options of a proof; each field is a flag of `still-export prove`, with its meaning in `verify` and `bench`."""

    model: str | None = option(None, "The PyTorch model, if it is no longer where it was exported from.")
    calls: Path | None = option(None, "Read PyTorch's answers from a file made with verify --record.")
    provider: str = option("cpu", "ONNX Runtime's provider: cpu or cuda.")
    reference_device: str | None = option(None, "Device of PyTorch: cpu or cuda.", shown="cpu")
    seed: int = option(0, "Seed of the prompts.")
    lengths: tuple[int, ...] = option(
        (), "Context lengths to measure.", commas=True, shown=f"{','.join(map(str, LENGTHS))}, those that fit"
    )


@dataclass(frozen=True)
class Proven:
    """The record, and sentences on what could not be checked here."""

    record: Record
    missing: list[str]


def prove(
    package: str | Path, options: ProveOptions = ProveOptions(), say: Callable[[str], None] = lambda done: None
) -> Proven:
    """Build, verify and measure a package as far as this machine can.

    Raises:
        ConfigError: The project has no runtime for this target.
        PackageError: The package is damaged or does not run here.
        ModuleNotFoundError: The target's runtime is not installed.
    """
    opened = open_package(Path(package), check_hashes=False)  # the builder and verify check them
    target = packaged_target(opened.manifest)
    runtime = runtime_of(opened.manifest["target"], None)
    demand(*runtime.modules)
    if target.built and not opened.manifest["engines"]:
        from still_export.engines.build import build_engines

        say("building")
        build_engines(open_package(Path(package)), progress=say)
        opened = open_package(Path(package))
    missing: list[str] = []
    begin = time.monotonic()
    verified = _verified(opened, options, missing, say)
    report = None if verified is None else verified.report
    figures: dict[str, Any] = {} if report is None else _figures(report)
    figures["seconds"] = round(time.monotonic() - begin, 1)
    say("measuring")
    setting = BenchOptions(provider=options.provider, lengths=options.lengths)
    if left := sorted(set(LENGTHS) - set(setting.fitting_lengths(opened.manifest))) if not options.lengths else []:
        missing.append(f"speed at {', '.join(map(str, left))} tokens, which exceed the package's capacity")
    try:
        rows = bench(opened.path, setting, say)
        figures["speed"] = speed_of(rows)
    except PackageError as error:
        if report is None or report.passed:
            raise
        missing.append(f"speed: {error}")
    manifest = opened.manifest
    quantized = manifest.get("quantization")
    subject = {
        "package": opened.path.resolve().name,
        "family": manifest["model"]["family"],
        "target": target.name,
        "dtype": manifest["model"]["dtype"],
        "quantize": "" if quantized is None else quantized["scheme"],
        "provider": "" if runtime.engines else options.provider,
    }
    described = {name: text for name, text in subject.items() if text}
    passed = None if report is None else report.passed
    kind: Literal["proof", "benchmark"] = "benchmark" if passed is None else "proof"
    ran = what_ran(manifest)
    versions = {"tensorrt": engines[0]["tensorrt"]} if (engines := manifest.get("engines")) else {}
    proven: dict[str, Any] = (
        {} if verified is None else {"inputs": verified.inputs, "not_asked": verified.report.not_asked}
    )
    name = described["package"]
    made = make_record(kind, name, described, figures, ran, passed, options.seed, versions=versions, **proven)
    return Proven(made, missing)


def _verified(
    package: Package, options: ProveOptions, missing: list[str], say: Callable[[str], None]
) -> VerifyResult | None:
    """The verdict, or None without PyTorch's answers."""

    def progress(phase: str, done: int, total: int) -> None:
        say(f"verifying: {phase}, {done} of {total}")

    settings = VerifyOptions(
        model=options.model,
        calls=options.calls,
        provider=options.provider,
        reference_device=options.reference_device,
        seed=options.seed,
    )
    try:
        say("verifying")
        return verify(package.path, settings, progress=progress)
    except ModuleNotFoundError as error:
        if options.calls is not None or error.name not in ("torch", "transformers"):
            raise
        missing.append(f"a comparison with PyTorch: {error.name} is not installed; give answers with --calls")
    except ModelNotFoundError as error:
        missing.append(f"a comparison with PyTorch: {error}")
    return None


def _figures(report: Report) -> dict[str, Any]:
    worst = max(report.outputs, key=lambda each: each.worst / each.bound if each.bound else 0.0)
    wrong = [f"{report.selections.wrong} selections differ without a near tie"] if report.selections.wrong else []
    wrong += [each.describe() for each in report.mismatches[:SHOWN]]
    wrong += [f"{each.name}: {each.what}" for each in report.checks if not each.passed]
    return {
        "cases": len({each.case for each in report.outputs}),
        "worst_of_its_bound": round(worst.worst / worst.bound, 4) if worst.bound else 0.0,
        "worst_output": worst.output,
        "top1": report.top1,
        "near_ties": report.selections.near_ties,
        **({"failure": "; ".join(wrong)} if wrong else {}),
    }
