"""still-export export: from a model to a package."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from still_export.cli.output import Output
from still_export.errors import ConfigError

EXAMPLES = """
Examples:

    still-export MODEL_FOLDER --to onnx -o package

    still-export model.gguf --to onnx --attach-untrained --capacity-tokens 32768 -o package

    still-export export --config package/manifest.json -o again
"""


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command("export", epilog=EXAMPLES)(export)


def export(
    model: Annotated[
        str | None, typer.Argument(help="STILL model: Hugging Face folder, hub id, or GGUF file.", show_default=False)
    ] = None,
    to: Annotated[str, typer.Option("--to", help="Target: onnx.")] = "onnx",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Package folder to write.", show_default=False)
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing folder.")] = False,
    attach_untrained: Annotated[
        bool, typer.Option("--attach-untrained", help="Give a plain softmax model untrained STILL attention.")
    ] = False,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, float16 or bfloat16.", show_default="auto")] = None,
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
    config: Annotated[Path | None, typer.Option(help="Repeat the export that this manifest.json records.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Export a model to a package: model.onnx, weights, tokenizer, run_ort.py, manifest.json."""
    from dataclasses import asdict, replace

    from still_export.onnx_package import ExportOptions, export_onnx

    if to not in TARGETS:
        raise ConfigError(f"--to {to} is unknown; known: {', '.join(TARGETS)}.")
    if output is None:
        raise typer.BadParameter("give the package folder to write: -o DIR", param_hint="-o")
    given: dict[str, Any] = {
        "model": model,
        "attach_untrained": attach_untrained or None,
        "dtype": dtype,
        "all_logits": all_logits or None,
        "overlays": tuple(overlay) if overlay else None,
        "revision": revision,
        "chunk_size": chunk_size,
        "salient_per_chunk": salient_per_chunk,
        "select_scope": select_scope,
        "capacity_tokens": capacity_tokens,
        "overflow": overflow,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if config is not None:
        try:
            recorded = ExportOptions.from_manifest(json.loads(config.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{config} is no manifest of an export: {error}.") from error
        options = replace(recorded, **given)
    elif model is None:
        raise typer.BadParameter("give a model, or --config manifest.json", param_hint="MODEL")
    else:
        options = ExportOptions(**given)
    if Path(options.model).exists():
        options = replace(options, model=str(Path(options.model).resolve()))
    out = Output(as_json, quiet)
    with out.steps() as progress:
        package = export_onnx(
            options, output, force=force, command=shlex.join(["still-export", *sys.argv[1:]]), progress=progress
        )
    size = sum(entry["size_bytes"] for entry in package.manifest["files"].values())
    out.result(
        {"package": str(output), "size_bytes": size, "config": asdict(options)},
        f"{output}: {len(package.manifest['files'])} files, {size / 2**20:.0f} MiB",
        f'next: still-export run {output} --prompt "..."   or   still-export verify {output}',
    )


TARGETS = ("onnx",)
