"""still-export export: from a model to a package."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from still_export.cli.next_commands import next_commands
from still_export.cli.output import Output
from still_export.errors import ConfigError

if TYPE_CHECKING:
    from still_export.export.onnx_package import ExportOptions

EXAMPLES = """
Examples:

    still-export MODEL_FOLDER --to onnx -o package

    still-export model.gguf --to onnx --attach-untrained --capacity-tokens 32768 -o package

    still-export MODEL_FOLDER --to onnx --native -o package

    still-export MODEL_FOLDER --to trt --fp16 --arch sm_87,sm_90 -o package

    still-export export --config package/manifest.json -o again
"""


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command("export", epilog=EXAMPLES)(export)


def export(
    model: Annotated[
        str | None, typer.Argument(help="STILL model: Hugging Face folder, hub id, or GGUF file.", show_default=False)
    ] = None,
    to: Annotated[str | None, typer.Option("--to", help="Target: onnx, trt or trt-rtx.", show_default="onnx")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Package folder to write.", show_default=False)
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing package.")] = False,
    attach_untrained: Annotated[
        bool, typer.Option("--attach-untrained", help="Give a plain softmax model untrained STILL attention.")
    ] = False,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float32, float16, bfloat16, or auto: as stored, but bfloat16 as float32.", show_default="auto"
        ),
    ] = None,
    all_logits: Annotated[
        bool, typer.Option("--all-logits", help="Logits of every position, not of the last token.")
    ] = False,
    overlay: Annotated[list[str] | None, typer.Option(help="LoRA adapter or feature maps to add; repeatable.")] = None,
    revision: Annotated[str | None, typer.Option(help="Revision of a hub id.")] = None,
    chunk_size: Annotated[int | None, typer.Option(help="Tokens per chunk.", show_default="64")] = None,
    salient_per_chunk: Annotated[
        int | None, typer.Option(help="Tokens per chunk that stay in softmax.", show_default="4")
    ] = None,
    select_scope: Annotated[
        str | None, typer.Option(help="q_head, kv_group_max or kv_group_mean.", show_default="q_head")
    ] = None,
    capacity_tokens: Annotated[
        int | None, typer.Option(help="Longest sequence.", show_default="the model's own")
    ] = None,
    overflow: Annotated[
        str | None, typer.Option(help="Beyond it: error, fold_min_score or fold_oldest.", show_default="error")
    ] = None,
    quantize: Annotated[
        str | None, typer.Option(help="onnx: weights in int8 or int4, by a policy.", show_default="no")
    ] = None,
    quantize_method: Annotated[
        str | None, typer.Option(help="Who rounds to 4 bits: rtn, k_quant or hqq.", show_default="rtn")
    ] = None,
    quantize_block: Annotated[
        int | None, typer.Option(help="Weights that share a scale: 16 to 256.", show_default="32")
    ] = None,
    lora: Annotated[
        str | None,
        typer.Option(help="With --quantize, LoRA pairs of an --overlay: apart or merged.", show_default="apart"),
    ] = None,
    native: Annotated[
        bool, typer.Option("--native", help="onnx: add native kernels for CPUs like this one (cmake, g++).")
    ] = False,
    onnxruntime_include: Annotated[
        Path | None,
        typer.Option(help="onnx: folder of onnxruntime_c_api.h for --native.", show_default="/usr/include/onnxruntime"),
    ] = None,
    fp16: Annotated[bool, typer.Option("--fp16", help="trt: half precision (the default there).")] = False,
    bf16: Annotated[bool, typer.Option("--bf16", help="trt: bfloat16, for TensorRT 10 and later.")] = False,
    arch: Annotated[
        str | None,
        typer.Option(
            help="GPUs to compile for; onnx: for --native.", show_default="trt: sm_80,sm_86,sm_87,sm_89,sm_90"
        ),
    ] = None,
    prefill_tokens: Annotated[
        int | None, typer.Option(help="Tokens of one prefill call.", show_default="512; trt: 2048")
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(help="trt: most rows at once; 8.6 builds for one in half the time.", show_default="1"),
    ] = None,
    workspace: Annotated[
        int | None, typer.Option(help="trt: limit of TensorRT's workspace, MiB.", show_default="none")
    ] = None,
    version_compatible: Annotated[
        bool, typer.Option("--version-compatible", help="trt: engines that later versions run too.")
    ] = False,
    strip_weights: Annotated[
        bool, typer.Option("--strip-weights", help="trt: engines without weights (TensorRT 10 and later).")
    ] = False,
    tensorrt_include: Annotated[
        list[Path] | None,
        typer.Option(
            help="trt: folder of NvInfer.h to compile the plugin for; repeatable.", show_default="the usual places"
        ),
    ] = None,
    dump_dir: Annotated[
        Path | None, typer.Option(help="trt: write the graph after each pass here, without weights.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="Repeat the export that this manifest.json records.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Export a model to a package: graph, weights, tokenizer, a runner, manifest.json; for trt also kernels, plugin and engine."""
    from dataclasses import asdict, replace

    from still_export.export.onnx_package import ExportOptions, export_onnx
    from still_export.quantization.policy import demand_target

    manifest = _read_manifest(config)
    to = to or manifest.get("target", "onnx")
    if to not in TARGETS:
        raise ConfigError(f"--to {to} is unknown; known: {', '.join(TARGETS)}.")
    if output is None:
        raise typer.BadParameter("give the package folder to write: -o DIR", param_hint="-o")
    given: dict[str, Any] = {
        "model": model,
        "attach_untrained": attach_untrained or None,
        "dtype": _dtype(dtype, fp16, bf16, to if config is None else "onnx"),
        "all_logits": all_logits or None,
        "overlays": tuple(overlay) if overlay else None,
        "revision": revision,
        "native": native or None,
        "quantize": quantize,
        "quantize_method": quantize_method,
        "quantize_block": quantize_block,
        "lora": lora,
        "prefill_tokens": prefill_tokens if to == "onnx" else None,
    }
    given = {name: value for name, value in given.items() if value is not None}
    still = {
        "chunk_size": chunk_size,
        "salient_per_chunk": salient_per_chunk,
        "select_scope": select_scope,
        "capacity_tokens": capacity_tokens,
        "overflow": overflow,
    }
    if still := {name: value for name, value in still.items() if value is not None}:
        given["still"] = {**manifest.get("config", {}).get("still", {}), **still}
    if config is not None:
        options = replace(ExportOptions.from_manifest(manifest), **given)
    elif model is None:
        raise typer.BadParameter("give a model, or --config manifest.json", param_hint="MODEL")
    else:
        options = ExportOptions(**given)
    # The manifest is read from other working directories.
    options = replace(options, model=_absolute(options.model), overlays=tuple(map(_absolute, options.overlays)))
    out, command = Output(as_json, quiet), shlex.join(["still-export", *sys.argv[1:]])
    asked = {
        "arch": tuple(arch.split(",")) if arch else None,
        "prefill_tokens": None if to == "onnx" else prefill_tokens,
        "batch": batch,
        "workspace": workspace,
        "version_compatible": version_compatible or None,
        "strip_weights": strip_weights or None,
        "tensorrt_include": tuple(map(str, tensorrt_include)) if tensorrt_include else None,
    }
    asked = {k: v for k, v in asked.items() if v is not None}
    if to == "onnx" and arch:
        options = replace(options, archs=tuple(arch.split(",")))
        del asked["arch"]
    if to == "onnx" and (asked or dump_dir):
        flags = ", ".join("--" + name.replace("_", "-") for name in (*asked, *(["dump_dir"] if dump_dir else [])))
        raise ConfigError(f"{flags}: for --to trt and trt-rtx, not for --to onnx.")
    if options.quantize:
        demand_target(to)
    if to != "onnx":
        if native or onnxruntime_include:
            raise ConfigError(f"--native and --onnxruntime-include are for --to onnx, not for --to {to}.")
        options = replace(options, native=False, archs=())  # a repeated export to ONNX may have it
        asked = {{"arch": "archs", "workspace": "workspace_mib"}.get(k, k): v for k, v in asked.items()}
        _export_trt(options, to, manifest, asked, output, force, command, out, dump_dir)
        return
    with out.steps() as progress:
        package = export_onnx(
            options, output, force=force, command=command, progress=progress, onnxruntime_include=onnxruntime_include
        )
    size = sum(entry["size_bytes"] for entry in package.manifest["files"].values())
    out.result(
        {"package": str(output), "size_bytes": size, "config": asdict(options)},
        f"{output}: {len(package.manifest['files'])} files, {size / 2**20:.0f} MiB",
        next_commands(output, to),
    )


def _absolute(source: str) -> str:
    """A path as an absolute one; hub ids stay."""
    return str(Path(source).resolve()) if Path(source).exists() else source


def _read_manifest(config: Path | None) -> dict[str, Any]:
    """The manifest to repeat, empty without one."""
    if config is None:
        return {}
    try:
        manifest = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{config} is no manifest of an export: {error}.") from error
    if not isinstance(manifest, dict):
        raise ConfigError(f"{config} is no manifest of an export.")
    return manifest


def _dtype(dtype: str | None, fp16: bool, bf16: bool, to: str) -> str | None:
    """The element type asked for; engines are float16 unless told otherwise."""
    if (dtype is not None) + fp16 + bf16 > 1:
        raise typer.BadParameter("give one of --dtype, --fp16, --bf16")
    if fp16 or bf16:
        return "float16" if fp16 else "bfloat16"
    return dtype or (None if to == "onnx" else "float16")


def _export_trt(
    options: ExportOptions,
    to: str,
    manifest: dict[str, Any],
    asked: dict[str, Any],
    output: Path,
    force: bool,
    command: str,
    out: Output,
    dump_dir: Path | None = None,
) -> None:
    """Write a package for TensorRT, as `asked` or else as `manifest` records it, and its engines where that is possible here."""
    from still_export.engines.build import build_engines
    from still_export.engines.builder import NoBuilderError
    from still_export.engines.options import TrtOptions
    from still_export.export.trt_package import export_trt

    trt = TrtOptions.from_manifest(manifest if manifest.get("target") == to else {}, target=to, **asked)
    with out.steps() as progress:
        package = export_trt(options, trt, output, force=force, command=command, progress=progress, dump_dir=dump_dir)
        try:
            engines = build_engines(package, progress=progress)
        except NoBuilderError as error:
            engines, reason = [], str(error)
    if not package.manifest.get("plugins", True):
        out.log(
            "no plugin library: there is no NvInfer.h in the usual places. Name its folder with --tensorrt-include, or the engine's "
            "machine will need --plugin."
        )
    if not engines:
        out.log(f"no engine yet: {reason}")
    out.result(
        {"package": str(output), "engines": [str(e) for e in engines], "trt": asked},
        f"{output}: {', '.join(e.name for e in engines) or 'no engine yet'}",
        next_commands(output, to) if engines else f"next: still-export build {shlex.quote(str(output))}",
    )


TARGETS = ("onnx", "trt", "trt-rtx")
