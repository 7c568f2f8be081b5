"""still-export verify of a decoder from another exporter: prove it against its model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from still_export.cli.output import Output, report_folder
from still_export.errors import ConfigError
from still_export.extras import demand
from still_export.package.files import MANIFEST

FLAGS = ("model", "lengths", "seed")
"""Options that apply here."""


def is_foreign(path: Path) -> bool:
    """Whether `path` is an ONNX file, or a folder of them without this project's manifest."""
    if path.is_file():
        return path.suffix == ".onnx"
    graphs = (found for pattern in ("*.onnx", "onnx/*.onnx", "genai_config.json") for found in path.glob(pattern))
    return not (path / MANIFEST).exists() and any(graphs)


def verify_foreign(
    package: Path, output: Path | None, flags: Mapping[str, Any], out: Output, junit: Path | None = None
) -> bool:
    """Compare a decoder with its model in every way of `ForeignProof`; print the verdict and write it, for CI to `junit`.

    Raises:
        ConfigError: The model is not named or cannot be read, or a flag does not apply.
        PackageError, UnsupportedError: The decoder cannot be read, has no states, or has inputs of unknown meaning.
    """
    from still_export.package.staging import write_json
    from still_export.proof.foreign import LENGTHS, ForeignProof
    from still_export.report.junit import write_junit

    demand("onnx", "onnxruntime")
    if wrong := [
        f"--{name.replace('_', '-')}" for name, value in flags.items() if value is not None and name not in FLAGS
    ]:
        raise ConfigError(
            f"{', '.join(wrong)}: not with a decoder of another exporter. Leave {'it' if len(wrong) == 1 else 'them'} out."
        )
    if flags.get("model") is None:
        raise ConfigError(f"{package} was exported by another program: name its model with --model.")
    proof = ForeignProof(package, flags["model"], flags.get("lengths") or LENGTHS, flags.get("seed") or 0)
    where = report_folder(output or (package if package.is_dir() else package.parent) / "verify")
    with out.steps() as step:
        step("verifying")
        report = proof.run()
    content = {"passed": report.passed, **asdict(report)}
    write_json(where / "report.json", content)
    if junit is not None:
        write_junit(content, package.name, junit)
    out.result(
        content,
        *(f"{'ok   ' if check.passed else 'WRONG'} {check.name}: {check.what}" for check in report.checks),
        *(f"not covered: {line}" for line in report.unseen),
        f"report: {where / 'report.json'}",
        "PASSED" if report.passed else "FAILED: the decoder does not compute what the model computes",
    )
    return report.passed
