"""still-export export: from a model to a package."""

from __future__ import annotations

import re
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from still_export.cli.output import LOADING, Output, command_line, next_commands
from still_export.errors import ConfigError
from still_export.folders.model import check_model, check_overlay
from still_export.folders.sources import demand_model
from still_export.package.refusals import first_line
from still_export.package.staging import demand_free
from still_export.texts.files import read_text

if TYPE_CHECKING:
    from still_export.folders.model import ModelFolder
    from still_export.graph.options import ExportOptions
    from still_export.package.folder import Package
    from still_export.targets.target import Target

EXAMPLES = """
Examples:

    still-export MODEL_FOLDER --to onnx -o package

    still-export model.gguf --to onnx --attach-untrained --capacity-tokens 32768 -o package

    still-export MODEL_FOLDER --to trt --arch sm_87,sm_90 -o package

    still-export export --config package/manifest.json -o again
"""

NO_KERNELS = (
    "without kernels for CPUs, which are faster: pip install still-export-kernels, or install cmake and g++ and run still-export "
    "kernels build"
)
JETSON = "sm_87"
NO_JETSON_PLUGIN = (
    f"{JETSON} is a Jetson, and the plugin library and still_run are for this kind of machine: export with --cpu aarch64 "
    "(g++-aarch64-linux-gnu), or export on the Jetson."
)
NO_PLUGIN = (
    "no plugin library: NvInfer.h is not in the usual places. Name its folder with --tensorrt-include, or the engine's "
    "machine will need --plugin."
)


def export(
    flags: dict[str, Any],
    model: Annotated[
        str | None, typer.Argument(help="STILL model: Hugging Face folder, hub id, or GGUF file.", show_default=False)
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Package folder to write.", show_default=False)
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing package.")] = False,
    fp16: Annotated[bool, typer.Option("--fp16", help="Short for --dtype float16.")] = False,
    bf16: Annotated[bool, typer.Option("--bf16", help="Short for --dtype bfloat16.")] = False,
    dump_dir: Annotated[
        Path | None, typer.Option(help="Write the graph after each step here, without weights.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="Repeat the export that this manifest.json records.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Export a model to a package: graph, weights, tokenizer, a runner, manifest.json; for trt also kernels, plugin and engine."""
    if output is None:
        raise ConfigError("no -o: give the package folder to write, -o DIR.")
    if model is None and config is None:
        raise ConfigError(
            "no model. Type: still-export MODEL --to onnx -o DIR, or still-export export --config manifest.json -o DIR"
        )
    if ("dtype" in flags) + fp16 + bf16 > 1:
        raise ConfigError("--dtype, --fp16 and --bf16 all choose the type: give one of them.")
    flags |= {"dtype": "float16" if fp16 else "bfloat16"} if fp16 or bf16 else {}
    files = None
    if model is not None:
        overlays, untrained = flags.get("overlays") or (), config is not None or bool(flags.get("attach_untrained"))
        found = demand_model(model, "export", overlays, untrained)
        files = found.folder
        check_model(files or model, flags.get("revision"))
        for overlay in overlays if files is None else files.added:
            check_overlay(overlay)
        for text in flags.get("calibrate") or ():
            read_text(Path(text))
        _check_dtype(flags.get("to"), flags.get("dtype"), found.dtype)
    demand_free(output, force)
    out = Output(as_json, quiet)
    with out.waiting(LOADING):
        from still_export.targets import export as exporting
        from still_export.targets.registry import target_of

    flags |= {} if model is None else {"model": model}
    job = exporting.plan_job(flags.pop("to", None), flags, exporting.read_manifest(config) if config else None)
    target = target_of(job.to, job.options)
    if "native" in target.flags and job.options.native is None and job.options.cpu is None and not job.options.archs:
        _build_kernels(out)
    with out.steps() as progress:
        package = exporting.export(
            job.export_options,
            output,
            to=job.to,
            options=job.options,
            force=force,
            command=command_line(),
            progress=progress,
            dump_dir=dump_dir,
            model=files,
        )
        progress("running a short text")
        overflow = _overflow(job.export_options, files, package)
        engines, lacking = _engines(package, target, progress)
    if overflow:
        out.say(overflow)
    _report_missing_code(package, target, out)
    report_rounding(package, out)
    if lacking:
        out.log(f"no engine yet: {lacking}")
    manifest = package.manifest
    size = sum(entry["size_bytes"] for entry in manifest["files"].values())
    content = {"package": str(output), "size_bytes": size, "config": manifest["config"]}
    made = f"{len(manifest['files'])} files, {size / 1e6:,.0f} MB"
    if target.built:
        content |= {"engines": [str(e) for e in engines], "trt": manifest.get("trt")}
        made = ", ".join(e.name for e in engines) or "no engine yet"
    out.result(content, f"{output}: {made}", next_commands(output, target.to, ready=bool(engines) or not target.built))


def _build_kernels(out: Output) -> None:
    """Build the kernels for this processor, which the export does not need, if they are missing and can be built."""
    from still_export.targets.ort.library import build_library, can_build, find_library
    from still_export.targets.trt.plugins import PluginBuildError

    if find_library() is not None or not can_build():
        return
    out.log(
        "building the kernels for this processor, once: one to three minutes of it; pip install still-export-kernels brings them, "
        "--no-native leaves them out"
    )
    begin = time.monotonic()
    try:
        with out.steps() as progress:
            progress("building the kernels")
            build_library()
    except PluginBuildError as error:
        out.log(f"no kernels: {first_line(error)}")
    else:
        out.log(f"kernels built in {time.monotonic() - begin:.0f} s; later exports include them")


def _check_dtype(to: str | None, requested: str | None, stored: str) -> None:
    """Refuse a type at once if no target named `to` computes in it."""
    from still_export.targets.registry import names, targets_of

    if to not in names():
        return
    targets = targets_of(to)
    dtype = requested or targets[0].dtype
    if dtype == "auto":
        dtype = "float32" if stored == "bfloat16" else stored
    if dtype and not any(dtype in target.dtypes for target in targets):
        targets[0].check_dtype(dtype)


def _engines(package: Package, target: Target, progress: Any) -> tuple[list[Path], str]:
    """Returns (engines, reason there are none)."""
    from still_export.targets.target import NoBuilderError

    if not target.built:
        return [], ""
    from still_export.engines.build import build_engines

    try:
        return build_engines(package, None, progress), ""
    except NoBuilderError as error:
        return [], str(error)


def _overflow(options: ExportOptions, files: ModelFolder | None, package: Package) -> str:
    """The warning for a model that overflows in the package's type, or ""."""
    from still_export.proof.overflow import overflow_of

    dtype = package.manifest["model"]["dtype"]
    found = None if dtype == "bfloat16" else overflow_of(options, files)
    if found is None:
        return ""
    advice = "Export it with --dtype bfloat16 or float32." if dtype == "float16" else "Its weights may be damaged."
    return (
        f"warning: this model overflows in {dtype} {found.where} on a short text, so its answers are useless. {advice}"
    )


def report_rounding(package: Package, out: Output) -> None:
    """Report source codes that the package does not store unchanged."""
    codes = package.manifest.get("source_codes") or {"floats": 0, "rounded": {}}
    if codes["floats"]:
        dtype = package.manifest["model"]["dtype"]
        out.log(f"{codes['floats']} weights are codes in the source, and {dtype} here: --quantize keeps those that fit")
    if rounded := codes["rounded"]:
        layers = Counter(re.sub(r"\.\d+\.", ".*.", name) for name in rounded)
        named = ", ".join(f"{name} ({count})" for name, count in sorted(layers.items()))
        worst = max(rounded, key=rounded.__getitem__)
        out.log(
            f"codes of the source that --quantize {package.manifest['config']['quantize']} cannot store were rounded again: {named}; "
            f"relative errors are up to {rounded[worst]:.2%} ({worst}), and in manifest.json"
        )


def _report_missing_code(package: Package, target: Target, out: Output) -> None:
    """Report native code that is missing in the package, and which systems start what is there."""
    from still_export.targets.ort.library import find_library
    from still_export.targets.trt.plugins import oldest_glibc, this_cpu

    manifest = package.manifest
    if not manifest.get("plugins", True):  # only targets with plugins have this entry
        out.log(NO_PLUGIN)
    trt = manifest.get("trt") or {}
    if manifest.get("plugins") and trt.get("archs") == [JETSON] and (trt.get("cpu") or this_cpu()) != "aarch64":
        out.log(NO_JETSON_PLUGIN)
    for major, library in manifest.get("plugins", {}).items():
        names = [name for name in (library, f"still_run{major}") if (package.path / name).is_file()]
        if glibc := max((oldest_glibc(package.path / name) for name in names), default=0):
            out.log(f"{' and '.join(names)} need glibc 2.{glibc} or later")
    has_code = manifest["config"].get("native") is not None or "native" in manifest
    if "native" in target.flags and not has_code and find_library() is None:
        out.log(NO_KERNELS)
