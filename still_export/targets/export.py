"""From a model to the package of a target, and the job that flags and a manifest describe."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from still_export.errors import ConfigError
from still_export.folders.model import ModelFolder
from still_export.graph.options import ExportOptions, Progress, silent
from still_export.mixers.choices import StillChoices
from still_export.options import names_of
from still_export.package.files import MANIFEST, is_gguf
from still_export.package.folder import Package, open_package, staged_folder
from still_export.targets.lower import PORTABLE_FOLDER, demand, dumper, lower, lower_into, refuse_flags_of_others
from still_export.targets.portable.narrow import narrow_package
from still_export.targets.portable.package import write_portable
from still_export.targets.registry import target_of, targets_of


def export(
    export_options: ExportOptions,
    output: str | Path,
    *,
    to: str = "onnx",
    options: Any = None,
    force: bool = False,
    command: str = "",
    progress: Progress = silent,
    dump_dir: Path | None = None,
    model: ModelFolder | None = None,
) -> Package:
    """Export a model to the package of a target: write the portable package, then lower it.

    Args:
        output: The package folder; it appears only once it is complete.
        to: Target named as in `--to`, or a record's name.
        options: The target's options, such as OrtOptions or TrtOptions; None: the defaults.
        dump_dir: Folder for the graph after each step, without weights.
        model: The model's files; None: they are opened.

    Raises:
        StillExportError: The model cannot be read or exported, or the package cannot be written.
    """
    options = targets_of(to)[0].options() if options is None else options
    target = target_of(to, options)
    demand(target, export_options, options)
    target.ready(options, progress)
    dump = None if dump_dir is None else dumper(dump_dir)
    with staged_folder(Path(output), force) as folder:
        hub = folder / PORTABLE_FOLDER
        hub.mkdir()
        write_portable(
            export_options,
            hub,
            partial(target.layout_for, options=options),
            target.to,
            files=model,
            check=lambda manifest: target.check_model(manifest, options),
            command=command,
            progress=progress,
            dump=dump,
        )
        lower_into(hub, folder, target, options, progress, os.replace, dump)
        shutil.rmtree(hub)
    return open_package(Path(output), check_hashes=False)


def lower_or_export(
    package: str | Path,
    to: str,
    output: str | Path,
    flags: Mapping[str, Any],
    *,
    dtype: str | None = None,
    progress: Progress = silent,
    **common: Any,
) -> Package:
    """Lower a portable package; if the target lacks the form or type of its low-bit weights, quantize the package's model again.

    Args:
        flags: The target's, by field of its options.
        dtype, common: See `lower`.

    Raises:
        StillExportError: See `lower` and `export`.
    """
    refuse_flags_of_others(targets_of(to)[0], dict(flags))
    options = targets_of(to)[0].options(**flags)
    manifest = open_package(Path(package), check_hashes=False).manifest
    target, model = target_of(to, options), str(manifest["config"].get("model", ""))
    wanted = dtype or manifest["model"]["dtype"]
    fits = target.has_form(manifest) and wanted in target.dtypes
    if fits or manifest.get("quantization") is None or not Path(model).exists():
        return lower(package, to, output, options=options, dtype=dtype, progress=progress, **common)
    kept = wanted if dtype or wanted in target.dtypes else target.dtypes[0]
    alike = {**manifest, "model": {**manifest["model"], "dtype": kept}, "quantization": None}
    target.check_model(alike, options)  # before the model is opened
    logging.getLogger(__name__).warning(
        "%s lacks the form or type of the low-bit weights of %s: they are made again, from %s", to, package, model
    )
    job = plan_job(to, {**flags, "dtype": kept}, manifest)
    return export(job.export_options, output, to=job.to, options=job.options, progress=progress, **common)


def derive(
    job: Job,
    folder: Path,
    portable: str | None = None,
    calibration: dict[str, Any] | None = None,
    narrow: str | None = None,
    origin: dict[str, Any] | None = None,
    progress: Progress = silent,
) -> tuple[set[str], bool]:
    """Export into the existing, empty `folder` without reading weights and compiling kernels, to compare a package with.

    Args:
        portable: The identity of the portable package, which depends on the weights.
        calibration: The calibration that the package's manifest records.
        origin: What the package's manifest says of the model's origin.
        narrow: Type that the portable package is narrowed to, as `lower --dtype` does.

    Returns:
        Names of the weights that are holes of the weights' files, and whether the target wrote the weights anew.

    Raises:
        StillExportError: As `export`.
    """
    target, holes = target_of(job.to, job.options), set[str]()
    hub = folder / PORTABLE_FOLDER
    hub.mkdir()
    write_portable(
        job.export_options,
        hub,
        partial(target.layout_for, options=job.options),
        target.to,
        check=lambda manifest: target.check_model(manifest, job.options),
        progress=progress,
        holes=holes,
        calibration=calibration,
        origin=origin or {},
    )
    if narrow is not None:
        wide, hub = hub, folder / f".{narrow}.part"
        hub.mkdir()
        narrow_package(Package(wide, read_manifest(wide / MANIFEST)), hub, narrow, progress, holes)
        shutil.rmtree(wide)
    rewritten = lower_into(hub, folder, target, job.options, progress, os.replace, holes=holes, portable=portable)
    shutil.rmtree(hub)
    return holes, rewritten


@dataclass(frozen=True)
class Job:
    """An export to the target `to` (a name of `--to`, or a record's) with that target's `options`."""

    export_options: ExportOptions
    to: str
    options: Any


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of an export to repeat.

    Raises:
        ConfigError: The file is not a manifest.
    """
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} is not a manifest of an export: {error}. Give manifest.json of a package."
        ) from error
    if not isinstance(manifest, dict):
        raise ConfigError(f"{path} is not a manifest of an export. Give manifest.json of a package.")
    return manifest


def plan_job(to: str | None, flags: Mapping[str, Any], manifest: dict[str, Any] | None = None) -> Job:
    """The export job of a manifest, changed by flags.

    Args:
        to: Target; None: the manifest's, else onnx.
        flags: The user's values, by field of ExportOptions, StillChoices and the target's options.

    Raises:
        ConfigError: The target is unknown, a flag belongs to another target, or the options contradict each other.
    """
    recorded = manifest or {}
    name = to or recorded.get("target", "onnx")
    meant = targets_of(name, "--to" if to else f"{MANIFEST}: target")[0]
    chosen_flags = dict(flags)
    refuse_flags_of_others(meant, chosen_flags)
    chosen = {field: chosen_flags.pop(field) for field in meant.flags if field in chosen_flags}
    if still := {field: chosen_flags.pop(field) for field in names_of(StillChoices) if field in chosen_flags}:
        chosen_flags["still"] = {**recorded.get("config", {}).get("still", {}), **still}
    if manifest is None:
        if name == "onnx" and "quantize" not in chosen_flags and (policy := _own_bits(str(chosen_flags.get("model")))):
            chosen_flags["quantize"] = policy
        export_options = ExportOptions(**{"dtype": meant.dtype, **chosen_flags})
    else:
        export_options = replace(ExportOptions.from_manifest(manifest), **chosen_flags)
    # The manifest may be read from another working directory.
    export_options = replace(
        export_options, model=_absolute(export_options.model), overlays=tuple(map(_absolute, export_options.overlays))
    )
    export_options = replace(export_options, calibrate=tuple(map(_absolute, export_options.calibrate)))
    options = meant.options.from_manifest(recorded, **chosen)
    target = target_of(name, options)
    # Check before anything is read, with the layout for the requested type, or the least demanding one.
    export_options.quantization(target.layout_for(export_options.dtype, options), target.to)
    demand(target, export_options, options)
    return Job(export_options, name, options)


def _own_bits(model: str) -> str | None:
    """The policy that keeps the blocks of a GGUF file; None: it is none, or most of its numbers are floats."""
    path = Path(model)
    if not is_gguf(path):
        return None
    from still_export.folders.gguf_description import quantize_policy
    from still_export.gguf.container import open_gguf

    return quantize_policy(open_gguf(path))


def _absolute(source: str) -> str:
    """An absolute path; hub ids and links stay, because link targets in Hugging Face's cache have neither suffix nor neighbouring parts."""
    return os.path.abspath(source) if Path(source).exists() else source
