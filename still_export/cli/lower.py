"""still-export lower: from a portable package to the package of a target."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from still_export.cli.next_commands import next_commands
from still_export.cli.output import Output

EXAMPLES = """
Examples:

    still-export lower package --to genai -o for_genai

    still-export lower package --to trt --arch sm_87 --batch 4 -o for_tensorrt
"""


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command("lower", epilog=EXAMPLES)(lower)


def lower(
    package: Annotated[Path, typer.Argument(help="Portable package, as `still-export MODEL -o PACKAGE` writes it.")],
    to: Annotated[
        str, typer.Option("--to", help="Target: onnx, genai, web, trt, trt8 or trt-rtx; onnx with --arch: for CUDA.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Package folder to write.")],
    force: Annotated[bool, typer.Option("--force", help="Replace an existing package.")] = False,
    native: Annotated[
        bool | None,
        typer.Option(
            "--native/--no-native",
            help="onnx, genai: with kernels for CPUs, built where there are none yet, or without.",
            show_default="with, where they are there",
        ),
    ] = None,
    cpu: Annotated[
        str | None,
        typer.Option(help="onnx, genai: CPUs of the kernels: x86_64 or aarch64.", show_default="this machine's"),
    ] = None,
    onnxruntime_include: Annotated[
        Path | None, typer.Option(help="onnx, genai: folder of onnxruntime_c_api.h to build them with.")
    ] = None,
    opset: Annotated[int | None, typer.Option(help="onnx: of ai.onnx, 23 or 27.", show_default="23")] = None,
    arch: Annotated[str | None, typer.Option(help="GPUs to compile for.")] = None,
    prefill_tokens: Annotated[int | None, typer.Option(help="Tokens of one prefill call.")] = None,
    batch: Annotated[int | None, typer.Option(help="trt: most sequences at once.", show_default="1")] = None,
    workspace: Annotated[int | None, typer.Option(help="trt: limit of TensorRT's workspace, MiB.")] = None,
    version_compatible: Annotated[
        bool, typer.Option("--version-compatible", help="trt: engines that later versions run too.")
    ] = False,
    strip_weights: Annotated[bool, typer.Option("--strip-weights", help="trt: engines without weights.")] = False,
    tensorrt_include: Annotated[
        list[Path] | None, typer.Option(help="trt: folder of NvInfer.h to compile the plugin for; repeatable.")
    ] = None,
    dump_dir: Annotated[
        Path | None, typer.Option(help="Write the graph after each step here, without weights.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Lower a portable package to a target, without the model: type, bits and capacity stay as they were exported."""
    from still_export.targets import lower as lowering
    from still_export.targets.registry import targets_of

    asked = {
        "native": native,
        "cpu": cpu,
        "onnxruntime_include": onnxruntime_include,
        "opset": opset,
        "archs": tuple(arch.split(",")) if arch else None,
        "prefill_tokens": prefill_tokens,
        "batch": batch,
        "workspace_mib": workspace,
        "version_compatible": version_compatible or None,
        "strip_weights": strip_weights or None,
        "tensorrt_include": tuple(map(str, tensorrt_include)) if tensorrt_include else None,
    }
    target = targets_of(to)[0]
    given = {name: value for name, value in asked.items() if value is not None}
    lowering.refuse_flags_of_others(target, given)
    out, command = Output(as_json, quiet), shlex.join(["still-export", *sys.argv[1:]])
    with out.steps() as progress:
        made = lowering.lower(
            package,
            to,
            output,
            options=target.options(**given),
            force=force,
            command=command,
            progress=progress,
            dump_dir=dump_dir,
        )
    ready = f"next: still-export build {shlex.quote(str(output))}" if target.built else next_commands(output, target.to)
    out.result({"package": str(output), "target": made.manifest["target"]}, f"{output}: {target.to}", ready)
