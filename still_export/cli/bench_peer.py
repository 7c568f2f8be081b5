"""still-export bench-peer: the base model in another runtime, to compare a package with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from still_export.cli.output import Output
from still_export.errors import ConfigError
from still_export.extras import demand

EXAMPLES = """
Examples:

    still-export bench-peer BASE --work work -o peer.json

    still-export bench PACKAGE --beside peer.json

    still-export bench-peer MODEL.gguf --runtime llama.cpp --threads 2 -o peer.json     the same file, with flash attention

    still-export bench-peer BASE --provider cuda --quantize int4     with onnxruntime-genai-cuda; float16 without --quantize
"""


def bench_peer(
    asked: dict[str, Any],
    model: Annotated[
        Path,
        typer.Argument(help="Base model: Hugging Face folder, or for genai and llama.cpp a GGUF file."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="JSON rows for bench --beside.")] = Path("peer.json"),
    runtime: Annotated[
        str, typer.Option(help="genai (its own export, made first), llama.cpp, or transformers.")
    ] = "genai",
    work: Annotated[Path, typer.Option(help="Folder that keeps genai's export for the next run.")] = Path("work"),
    quantize: Annotated[
        str | None, typer.Option(help="int4: genai's weights in 4 bits, as export --quantize int4.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the measurements as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Measure prefill, decode and peak memory of the base model with full attention in another runtime."""
    from still_export.evaluation.bench import LENGTHS, BenchOptions, to_dict
    from still_export.evaluation.peer import GENAI, LLAMA_CPP, RUNTIMES, build, measure_peer

    if runtime not in RUNTIMES:
        raise ConfigError(f"--runtime {runtime} is unknown; known: {', '.join(RUNTIMES)}.")
    if quantize not in (None, "int4") or (quantize and runtime != GENAI):
        raise ConfigError(f"--quantize {quantize} with --runtime {runtime}: give int4 with genai, or leave it out.")
    options = BenchOptions(**asked)
    provider = options.provider
    if provider not in ("cpu", "cuda") or (provider == "cuda" and runtime != GENAI):
        raise ConfigError(f"--provider {provider} with --runtime {runtime}: give cpu, or with genai cuda.")
    if not model.exists():
        raise ConfigError(f"{model} is not there; give a model folder or a GGUF file.")
    if (runtime == LLAMA_CPP) != (model.suffix == ".gguf") and runtime != GENAI:
        raise ConfigError(f"{model} with --runtime {runtime}: llama.cpp takes a GGUF file, transformers a folder.")
    wanted = options.lengths or LENGTHS
    demand(RUNTIMES[runtime])
    out = Output(as_json, quiet)
    if runtime == GENAI:
        work.mkdir(parents=True, exist_ok=True)
        model = build(model.resolve(), work, quantize or ("fp16" if provider == "cuda" else "fp32"), provider)
    with out.bar("measuring", len(wanted)) as progress:
        rows = measure_peer(runtime, model, wanted, options, progress)
    output.write_text(json.dumps(to_dict(rows), indent=1) + "\n", encoding="utf-8")
    lines = (
        f"{r.length:>8} tokens: prefill {r.prefill_s:.2f} s, decode {r.decode_ms:.1f} ms, peak {r.peak_mb:.0f} MB"
        for r in rows
    )
    out.result({"rows": to_dict(rows)}, *lines, f"next: still-export bench PACKAGE --beside {output}")
