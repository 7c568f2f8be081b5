"""What an export is asked for: flags, and the manifest of an export to repeat, as the options of its target; the export itself."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from still_export.errors import ConfigError
from still_export.graph.options import ExportOptions, Progress, silent
from still_export.package.files import MANIFEST
from still_export.package.folder import Package, open_package, staged_folder
from still_export.targets.dump import dumper
from still_export.targets.lower import demand, lower_into, refuse_flags_of_others
from still_export.targets.ort.options import OrtOptions
from still_export.targets.portable.package import write_portable
from still_export.targets.registry import target_of, targets_of
from still_export.targets.trt.options import TrtOptions
from still_graphs.ops import OPSET

OF_THE_TARGET = ("archs", "prefill_tokens")
"""Fields of ExportOptions and of TrtOptions: they mean the target's."""
PORTABLE_FOLDER = ".portable.part"
"""A name that no manifest lists."""


def export_model(
    options: ExportOptions,
    output: Path,
    *,
    to: str = "onnx",
    engines: TrtOptions | None = None,
    force: bool = False,
    command: str = "",
    progress: Progress | None = None,
    onnxruntime_include: Path | None = None,
    dump_dir: Path | None = None,
) -> Package:
    """Export a model to the package of a target: the portable package, lowered.

    Args:
        options: What to export and how.
        output: The package folder; written whole or not at all.
        to: Target, as `--to` has it, or the name of a record.
        engines: Of targets that have engines, what they are asked for; None: their defaults.
        force: Replace `output`.
        command: The command line, for the manifest.
        progress: Told each step.
        onnxruntime_include: Folder of ONNX Runtime's C headers for kernels; None: the usual places, else fetched.
        dump_dir: Gets the graph after each step, without its weights.

    Returns:
        The package.

    Raises:
        StillExportError: The model cannot be read or exported, or the package cannot be written.
    """
    say = progress or silent
    deployed: Any = engines or OrtOptions.of(options, onnxruntime_include)
    if engines is None and targets_of(to)[0].built:
        deployed = targets_of(to)[0].options()
    target = target_of(to, deployed)
    demand(target, options, deployed)
    target.ready(deployed, say)
    dump = None if dump_dir is None else dumper(dump_dir)
    with staged_folder(output, force) as folder:
        hub = folder / PORTABLE_FOLDER
        hub.mkdir()
        write_portable(
            options,
            hub,
            target.layout_for,
            target.to,
            check=lambda manifest: target.check_model(manifest, deployed),
            command=command,
            progress=say,
            dump=dump,
        )
        lower_into(hub, folder, target, deployed, say, os.replace, dump)
        shutil.rmtree(hub)
    return open_package(output, check_hashes=False)


@dataclass(frozen=True)
class Job:
    """An export of `options` to `target`.

    Args:
        options: The model, and how its graph is made.
        target: As `--to` has it, or the name of a record.
        trt: How TensorRT builds it; None: the package is for ONNX Runtime.
        onnxruntime_include: Folder of ONNX Runtime's C headers for a native library; None: the usual places.
        dump_dir: Where the graph is written after each step.
    """

    options: ExportOptions
    target: str = "onnx"
    trt: TrtOptions | None = None
    onnxruntime_include: Path | None = None
    dump_dir: Path | None = None

    def run(self, output: Path, *, force: bool, command: str, progress: Progress) -> Package:
        """Write the package; raises what `export_model` raises."""
        return export_model(
            self.options,
            output,
            to=self.target,
            engines=self.trt,
            force=force,
            command=command,
            progress=progress,
            onnxruntime_include=self.onnxruntime_include,
            dump_dir=self.dump_dir,
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
    name = to or recorded.get("target", "onnx")
    meant = targets_of(name, "--to" if to else f"{MANIFEST}: target")[0]
    given = {name: value for name, value in asked.items() if value is not None}
    refuse_flags_of_others(meant, given)
    include, dump_dir = given.pop("onnxruntime_include", None), given.pop("dump_dir", None)
    trt = {field: given.pop(field) for field in meant.fields if meant.built and field in given}
    if meant.built:
        trt |= {field: given.pop(field) for field in OF_THE_TARGET if field in given}
        if manifest is None:
            given.setdefault("dtype", "float16")  # engines, unless told otherwise
    if still := {field: value for field, value in given.pop("still", {}).items() if value is not None}:
        given["still"] = {**recorded.get("config", {}).get("still", {}), **still}
    options = ExportOptions(**given) if manifest is None else replace(ExportOptions.from_manifest(manifest), **given)
    # The manifest is read from other working directories.
    options = replace(options, model=_absolute(options.model), overlays=tuple(map(_absolute, options.overlays)))
    before = recorded if recorded.get("target") == meant.to else {}
    engines = TrtOptions.from_manifest(before, target=meant.to, **trt) if meant.built else None
    if engines is not None:
        options = replace(
            options, native=None, cpu=None, archs=(), opset=OPSET
        )  # a repeated export to ONNX may have it
    deployed: Any = engines or OrtOptions.of(options, include)
    target = target_of(name, deployed)
    # A refusal comes before anything is read; the layout of the type that is asked for, or of the least demanding one.
    options.quantization(target.layout, target.to)
    demand(target, options, deployed)
    return Job(options, name, engines, include, dump_dir)


def _absolute(source: str) -> str:
    """A path as an absolute one; hub ids stay."""
    return str(Path(source).resolve()) if Path(source).exists() else source
