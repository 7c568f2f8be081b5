"""still-export verify --runtime vllm: prove that an engine serves a STILL folder as PyTorch computes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from still_export.cli.output import Output, report_folder
from still_export.errors import ConfigError
from still_export.extras import demand

if TYPE_CHECKING:
    from still_export.proof.served import LoadReport

RUNTIME = "vllm"
REQUESTS = 24


def check_flags(runtime: str | None, engine_flags: Mapping[str, bool], package_flags: Mapping[str, bool]) -> None:
    """Refuse flags of one kind of proof with the other.

    Args:
        engine_flags, package_flags: Flags of the proof of an engine and of a package; whether each is set.
    """
    wrong, right = (package_flags, f"--runtime {RUNTIME}") if runtime == RUNTIME else (engine_flags, "a package")
    extra = [name for name, is_set in wrong.items() if is_set]
    if extra:
        raise ConfigError(f"{', '.join(extra)}: not with {right}. Leave {'it' if len(extra) == 1 else 'them'} out.")


def verify_served(
    folder: Path,
    output: Path | None,
    seed: int,
    requests: int,
    dtype: str | None,
    ranks: int,
    out: Output,
) -> bool:
    """Serve random requests from `folder` in every way of `loads_of`, compare them with PyTorch, print and write the verdict.

    Raises:
        ConfigError, UnsupportedError: The folder has no STILL model, or vLLM refuses it.
        ModuleNotFoundError: vLLM is not installed.
    """
    from still_export.models.description import describe_model
    from still_export.models.load import load_model, source_dtype
    from still_export.package.staging import write_json
    from still_export.proof.served import ANSWER_TOKENS, CONTEXT_TOKENS, ServedVerifier, loads_of, own_type
    from still_export.serving.vllm.engine import VllmEngine

    demand("vllm")
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{folder} has no config.json: vLLM serves a STILL model's folder, which linearize writes, not an export of it. "
            f"Verify an export without --runtime vllm: still-export verify {folder}"
        )
    kind = dtype or str(source_dtype(folder)).removeprefix("torch.")
    model = load_model(folder, dtype="float32")
    own = own_type(model, kind)
    half = None if own is None else load_model(folder, dtype=own)
    still = model.config.still
    context = (
        min(CONTEXT_TOKENS, still.deployment.capacity(model.config)) if still.deployment.bounded else CONTEXT_TOKENS
    )
    where = report_folder(output or folder / "verify")
    where.mkdir(parents=True, exist_ok=True)
    log = where / "vllm.log"
    log.write_text("")
    verifier = ServedVerifier(describe_model(model), model, half, VllmEngine(folder, kind, ranks, log), seed)
    loads = loads_of(context)
    found = []
    with out.bar("serving", len(loads)) as progress:
        for report in verifier.run(loads, requests, min(ANSWER_TOKENS, context // 2)):
            found.append(report)
            progress(report.name)
    passed = all(report.passed for report in found)
    content = {"passed": passed, "dtype": kind, "ranks": ranks, "loads": [asdict(report) for report in found]}
    content["not_asked"] = [line for report in found for line in report.not_asked]
    write_json(where / "report.json", content)
    if out.as_json:
        out.result(content)
    else:
        _print(found, kind, where)
        print("PASSED" if passed else "FAILED: vLLM does not answer what PyTorch computes")
    return passed


def _print(found: list[LoadReport], kind: str, folder: Path) -> None:
    console = Console(width=None if Console().is_terminal else 150)
    metric = "largest error" if kind == "float32" else "worst request's median error"
    table = Table(title=f"vLLM against PyTorch, {kind}: {metric} of a log-probability")
    for column in ("load", "requests", "tokens", "preempted", "near ties", "open", "turned", "error", "bound", ""):
        table.add_column(column, justify="left" if column in ("load", "") else "right", no_wrap=True)
    for report in found:
        names = ("requests", "tokens", "preemptions", "near_ties", "open_tokens", "turned")
        counts = [getattr(report, name) for name in names]
        verdict = "ok" if report.passed else f"{len(report.wrong)} WRONG"
        table.add_row(report.name, *map(str, counts), f"{report.worst:.1e}", f"{report.bound:.1e}", verdict)
    console.print(table)
    for report in found:
        for line in report.wrong[:5]:
            print(f"{report.name}: {line}")
        for line in report.not_asked:
            print(f"not asked: {line}")
    print(f"report: {folder / 'report.json'}; vLLM's messages: {folder / 'vllm.log'}")
