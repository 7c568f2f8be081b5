"""still-export export: from a model to a package."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from still_export.cli.next_commands import next_commands
from still_export.cli.output import Output

if TYPE_CHECKING:
    from still_export.targets.export import Job

EXAMPLES = """
Examples:

    still-export MODEL_FOLDER --to onnx -o package

    still-export model.gguf --to onnx --attach-untrained --capacity-tokens 32768 -o package

    still-export MODEL_FOLDER --to trt --fp16 --arch sm_87,sm_90 -o package

    still-export export --config package/manifest.json -o again
"""

NO_KERNELS = (
    "without kernels for CPUs, which are faster: still-export kernels build makes them once; later exports take them"
)


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command("export", epilog=EXAMPLES)(export)


def export(
    model: Annotated[
        str | None, typer.Argument(help="STILL model: Hugging Face folder, hub id, or GGUF file.", show_default=False)
    ] = None,
    to: Annotated[
        str | None, typer.Option("--to", help="Target: onnx, genai, web, trt or trt-rtx.", show_default="onnx")
    ] = None,
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
    cache: Annotated[
        str | None,
        typer.Option(
            help="Keep keys and values in float16 (onnx, float32) or int8.", show_default="as the activations"
        ),
    ] = None,
    quantize: Annotated[
        str | None,
        typer.Option(help="Weights in int8 or int4, by a policy.", show_default="no"),
    ] = None,
    quantize_method: Annotated[
        str | None, typer.Option(help="Who rounds to 4 bits: rtn, k_quant or hqq.", show_default="rtn")
    ] = None,
    quantize_block: Annotated[
        int | None,
        typer.Option(help="Weights that share a scale: 16 to 256; trt: 64 or 128.", show_default="32; trt: 64"),
    ] = None,
    lora: Annotated[
        str | None,
        typer.Option(help="With --quantize, LoRA pairs of an --overlay: apart or merged.", show_default="apart"),
    ] = None,
    adapters: Annotated[
        bool, typer.Option("--adapters", help="With --quantize: `run --adapter` may add a LoRA adapter.")
    ] = False,
    opset: Annotated[
        int | None,
        typer.Option(help="onnx: of ai.onnx, 23, or 27 for hosts with its linear attention.", show_default="23"),
    ] = None,
    native: Annotated[
        bool | None,
        typer.Option(
            "--native/--no-native",
            help="onnx: with kernels for CPUs, built (cmake, g++) where there are none yet, or without.",
            show_default="with, where they are there",
        ),
    ] = None,
    cpu: Annotated[
        str | None, typer.Option(help="onnx: CPUs of the kernels: x86_64 or aarch64.", show_default="this machine's")
    ] = None,
    onnxruntime_include: Annotated[
        Path | None,
        typer.Option(
            help="onnx: folder of onnxruntime_c_api.h to build them with.",
            show_default="the usual places, else fetched",
        ),
    ] = None,
    fp16: Annotated[bool, typer.Option("--fp16", help="trt: half precision (the default there).")] = False,
    bf16: Annotated[bool, typer.Option("--bf16", help="trt: bfloat16, for TensorRT 10 and later.")] = False,
    arch: Annotated[
        str | None,
        typer.Option(help="GPUs to compile for.", show_default="trt: sm_80,sm_86,sm_87,sm_89,sm_90"),
    ] = None,
    prefill_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens of one prefill call.", show_default="512; --arch: 2048 to 8192; trt: 2048"),
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
    from dataclasses import asdict

    from still_export.targets.export import plan_job, read_manifest
    from still_export.targets.ort.library import find_library

    if output is None:
        raise typer.BadParameter("give the package folder to write: -o DIR", param_hint="-o")
    if model is None and config is None:
        raise typer.BadParameter("give a model, or --config manifest.json", param_hint="MODEL")
    asked = {
        "model": model,
        "attach_untrained": attach_untrained or None,
        "dtype": _dtype(dtype, fp16, bf16),
        "all_logits": all_logits or None,
        "opset": opset,
        "overlays": tuple(overlay) if overlay else None,
        "revision": revision,
        "still": {
            "chunk_size": chunk_size,
            "salient_per_chunk": salient_per_chunk,
            "select_scope": select_scope,
            "capacity_tokens": capacity_tokens,
            "overflow": overflow,
            "cache": cache,
        },
        "quantize": quantize,
        "quantize_method": quantize_method,
        "quantize_block": quantize_block,
        "lora": lora,
        "adapters": adapters or None,
        "native": native,
        "cpu": cpu,
        "onnxruntime_include": onnxruntime_include,
        "archs": tuple(arch.split(",")) if arch else None,
        "prefill_tokens": prefill_tokens,
        "batch": batch,
        "workspace_mib": workspace,
        "version_compatible": version_compatible or None,
        "strip_weights": strip_weights or None,
        "tensorrt_include": tuple(map(str, tensorrt_include)) if tensorrt_include else None,
        "dump_dir": dump_dir,
    }
    job = plan_job(to, asked, read_manifest(config) if config else None)
    out, command = Output(as_json, quiet), shlex.join(["still-export", *sys.argv[1:]])
    if job.trt:
        _export_trt(job, output, force, command, out)
        return
    with out.steps() as progress:
        package = job.run(output, force=force, command=command, progress=progress)
    if job.options.native is None and "native" not in package.manifest and find_library() is None:
        out.log(NO_KERNELS)
    size = sum(entry["size_bytes"] for entry in package.manifest["files"].values())
    out.result(
        {"package": str(output), "size_bytes": size, "config": asdict(job.options)},
        f"{output}: {len(package.manifest['files'])} files, {size / 2**20:.0f} MiB",
        next_commands(output, job.target),
    )


def _dtype(dtype: str | None, fp16: bool, bf16: bool) -> str | None:
    """The element type asked for."""
    if (dtype is not None) + fp16 + bf16 > 1:
        raise typer.BadParameter("give one of --dtype, --fp16, --bf16")
    return "float16" if fp16 else "bfloat16" if bf16 else dtype


def _export_trt(job: Job, output: Path, force: bool, command: str, out: Output) -> None:
    """Write a package for TensorRT, and its engines where that is possible here."""
    from dataclasses import asdict

    from still_export.targets.trt.build import build_engines
    from still_export.targets.trt.builder import NoBuilderError

    with out.steps() as progress:
        package = job.run(output, force=force, command=command, progress=progress)
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
        {"package": str(output), "engines": [str(e) for e in engines], "trt": asdict(job.trt) if job.trt else None},
        f"{output}: {', '.join(e.name for e in engines) or 'no engine yet'}",
        next_commands(output, job.target) if engines else f"next: still-export build {shlex.quote(str(output))}",
    )
