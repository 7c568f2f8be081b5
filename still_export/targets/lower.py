"""What an export is asked for: flags, and the manifest of an export to repeat, as the options of its target."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from still_export.errors import ConfigError
from still_export.package.files import MANIFEST
from still_export.package.folder import Package
from still_export.targets.genai.package import demand_genai, export_genai
from still_export.targets.portable.package import ExportOptions, Progress, export_onnx
from still_export.targets.trt.options import TrtOptions
from still_export.targets.trt.package import export_trt, weight_layout
from still_graphs.ops import OPSET

OF_ONNXRUNTIME = ("onnx", "genai")
OF_TENSORRT = ("trt", "trt-rtx")
TARGETS = (*OF_ONNXRUNTIME, *OF_TENSORRT)
CACHE_TARGETS = ("onnx", "trt")
"""With keys and values in 8 bits."""
ONNX_ONLY = ("native", "cpu", "onnxruntime_include", "opset")
TRT_ONLY = ("batch", "workspace_mib", "version_compatible", "strip_weights", "tensorrt_include", "dump_dir")
OF_THE_TARGET = ("archs", "prefill_tokens")
"""Fields of ExportOptions and of TrtOptions: they mean the target's."""
FLAGS = {"archs": "arch", "workspace_mib": "workspace"}
"""Flags whose name is not their field's."""


@dataclass(frozen=True)
class Job:
    """An export of `options`; where `trt` is given, on to TensorRT.

    Args:
        options: The model, and how its graph is made.
        target: One of TARGETS.
        trt: How TensorRT builds it; None: the package is for ONNX Runtime.
        onnxruntime_include: Folder of ONNX Runtime's C headers for a native library; None: the usual places.
        dump_dir: Where the graph is written after each pass of TensorRT's pipeline.
    """

    options: ExportOptions
    target: str = "onnx"
    trt: TrtOptions | None = None
    onnxruntime_include: Path | None = None
    dump_dir: Path | None = None

    def run(self, output: Path, *, force: bool, command: str, progress: Progress) -> Package:
        """Write the package; raises what `export_onnx`, `export_genai` and `export_trt` raise."""
        if self.trt is None:
            export = export_genai if self.target == "genai" else export_onnx
            include = self.onnxruntime_include
            return export(
                self.options, output, force=force, command=command, progress=progress, onnxruntime_include=include
            )
        return export_trt(
            self.options, self.trt, output, force=force, command=command, progress=progress, dump_dir=self.dump_dir
        )


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of an export to repeat.

    Raises:
        ConfigError: It is none.
    """
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no manifest of an export: {error}.") from error
    if not isinstance(manifest, dict):
        raise ConfigError(f"{path} is no manifest of an export.")
    return manifest


def plan_job(to: str | None, asked: Mapping[str, Any], manifest: dict[str, Any] | None = None) -> Job:
    """The job of flags, which change what a manifest records.

    Args:
        to: Target, None: the manifest's, else onnx.
        asked: What was asked for by field of ExportOptions, TrtOptions and Job; None, of `still` too: nothing was.
        manifest: Of an export to repeat.

    Raises:
        ConfigError: The target is unknown, a flag is another target's, or the options contradict each other.
    """
    recorded = manifest or {}
    target = to or recorded.get("target", "onnx")
    if target not in TARGETS:
        asked_by = f"--to {to}" if to else f"{MANIFEST}: target={target!r}"
        raise ConfigError(f"{asked_by} is unknown; known: {', '.join(TARGETS)}.")
    given = {name: value for name, value in asked.items() if value is not None}
    _refuse_flags_of_others(target, given)
    trt = {name: given.pop(name) for name in TRT_ONLY if name in given}
    if target in OF_TENSORRT:
        trt |= {name: given.pop(name) for name in OF_THE_TARGET if name in given}
        if manifest is None:
            given.setdefault("dtype", "float16")  # engines, unless told otherwise
    include, dump_dir = given.pop("onnxruntime_include", None), trt.pop("dump_dir", None)
    if still := {name: value for name, value in given.pop("still", {}).items() if value is not None}:
        given["still"] = {**recorded.get("config", {}).get("still", {}), **still}
    options = ExportOptions(**given) if manifest is None else replace(ExportOptions.from_manifest(manifest), **given)
    # The manifest is read from other working directories.
    options = replace(options, model=_absolute(options.model), overlays=tuple(map(_absolute, options.overlays)))
    before = recorded if recorded.get("target") == target else {}
    engines = None if target in OF_ONNXRUNTIME else TrtOptions.from_manifest(before, target=target, **trt)
    options.quantization(weight_layout(engines) if engines else target)  # a refusal comes before anything is read
    if (cache := options.still.get("cache")) == "int8":
        if target not in CACHE_TARGETS:
            raise ConfigError(f"--cache int8 is for --to {' and '.join(CACHE_TARGETS)}, not for --to {target}.")
    elif cache:
        if target in OF_TENSORRT:
            raise ConfigError(
                f"--cache {cache} is for --to onnx, not for --to {target}; states there are as --dtype says."
            )
        if options.archs:
            raise ConfigError(
                f"--cache {cache} is for CPUs: kernels for {', '.join(options.archs)} keep states as --dtype says."
            )
    if target == "genai":
        demand_genai(options)
    if engines is None:
        return Job(options, target, onnxruntime_include=include)
    options = replace(options, native=None, cpu=None, archs=(), opset=OPSET)  # a repeated export to ONNX may have it
    return Job(options, target, engines, dump_dir=dump_dir)


def _refuse_flags_of_others(target: str, given: Mapping[str, Any]) -> None:
    """Raise ConfigError for a flag that means nothing to the target."""
    here = target in OF_ONNXRUNTIME
    wrong = [name for name in (TRT_ONLY if here else ONNX_ONLY) if name in given]
    if wrong:
        flags = ", ".join("--" + FLAGS.get(name, name).replace("_", "-") for name in wrong)
        theirs = " and ".join(OF_TENSORRT if here else OF_ONNXRUNTIME)
        raise ConfigError(f"{flags}: for --to {theirs}, not for --to {target}.")


def _absolute(source: str) -> str:
    """A path as an absolute one; hub ids stay."""
    return str(Path(source).resolve()) if Path(source).exists() else source
