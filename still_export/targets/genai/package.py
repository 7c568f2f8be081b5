"""The export verb for onnxruntime-genai: a package for ONNX Runtime with one more graph over the same weights, as genai feeds it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from still_export.errors import ConfigError
from still_export.package.folder import MANIFEST, MODEL, Package, open_package, staged_folder, write_manifest
from still_export.targets.portable.package import ExportOptions, Progress, export_onnx, silent
from still_export.targets.trt.options import GENERATED
from still_graphs.ops import OPSET

GRAPH = "genai.onnx"
CONFIG = "genai_config.json"
NO_LIMIT = 1 << 20
"""`context_length` of models whose states have one size for any number of tokens."""


def demand_genai(options: ExportOptions) -> None:
    """Raise ConfigError for what a package for genai cannot have."""
    if options.archs:
        raise ConfigError(
            f"--arch {','.join(options.archs)}: packages for genai run on the CPU; for CUDA export --to onnx."
        )
    if options.adapters:
        raise ConfigError(
            "--adapters: genai has no inputs for adapters that are exchanged; add one with --overlay, or export --to onnx."
        )
    if options.opset != OPSET:
        raise ConfigError(
            f"--opset {options.opset}: packages for genai have opset {OPSET}; for others export --to onnx."
        )
    if options.all_logits:
        raise ConfigError("--all-logits: genai reads the last token's logits alone; for all of them export --to onnx.")
    if options.dtype == "bfloat16":
        raise ConfigError("--dtype bfloat16: packages for genai run on the CPU, which has float32 and float16.")


def export_genai(
    options: ExportOptions,
    target: Path,
    *,
    force: bool = False,
    command: str = "",
    progress: Progress | None = None,
    onnxruntime_include: Path | None = None,
) -> Package:
    """Export a model to a package that onnxruntime-genai loads; `run`, `verify` and the other verbs take it as one for ONNX Runtime.

    Args:
        options: What to export and how.
        target: The package folder; written whole or not at all.
        force: Replace `target`.
        command: The command line, for the manifest.
        progress: Told each step.
        onnxruntime_include: As of `export_onnx`.

    Returns:
        The package.

    Raises:
        StillExportError: The model cannot be exported, genai cannot keep its states, or the package cannot be written.
    """
    say = progress or silent
    demand_genai(options)
    with staged_folder(target, force) as folder:
        portable = folder / ".portable"
        export_onnx(options, portable, command=command, progress=progress, onnxruntime_include=onnxruntime_include)
        say("joining the states for genai")
        for path in portable.iterdir():
            os.replace(path, folder / path.name)
        portable.rmdir()
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        shapes = _write_graph(folder)
        (folder / CONFIG).write_text(
            json.dumps(genai_config(folder, manifest, shapes), indent=1) + "\n", encoding="utf-8"
        )
        content = {k: v for k, v in manifest.items() if k not in GENERATED}
        write_manifest(folder, {**content, "target": "genai"}, manifest["files"])
    return open_package(target, check_hashes=False)


def _write_graph(folder: Path) -> dict[str, list[int]]:
    """Write the graph as genai feeds it, with the weights where they are; dimensions of its inputs but the batch."""
    import onnx

    from still_graphs.passes.walk import dimensions
    from still_graphs.pipelines import run_pipeline

    graph = onnx.load(folder / MODEL, load_external_data=False)
    run_pipeline(graph, "genai")
    onnx.save(graph, folder / GRAPH)
    known = dimensions(graph.graph)
    return {info.name: [d for d in known[info.name] if isinstance(d, int)] for info in graph.graph.input}


def genai_config(folder: Path, manifest: dict[str, Any], shapes: dict[str, list[int]]) -> dict[str, Any]:
    """What genai_config.json says of a package.

    Args:
        folder: The package; its tokenizer and generation configuration are read.
        manifest: Of the package.
        shapes: Dimensions of the inputs of its graph for genai, but the batch.
    """
    from still_graphs.passes.join_states import CACHE, RECURRENT, past_name, present_name

    model, capacity = manifest["model"], manifest["capacity"]
    tokens = int(capacity["capacity_tokens"])
    heads, rows, size = next(shape for name, shape in shapes.items() if name.endswith(f".{CACHE[0]}"))
    limited = capacity["bounded"] or rows > 1  # softmax layers keep a row for every token
    given = _json(folder / "generation_config.json")
    eos = manifest["eos_token_ids"]
    session: dict[str, Any] = {"log_id": "still-export", "provider_options": []}
    if native := manifest.get("native"):
        session["custom_ops_library"] = native["library"]
    names = {"inputs": ("past", past_name), "outputs": ("present", present_name)}
    templates = {
        part: {f"{side}_{key.removesuffix('_state')}_names": of("%d", key) for key in (*CACHE, *RECURRENT)}
        for part, (side, of) in names.items()
    }
    bos = given.get("bos_token_id")
    return {
        "model": {
            "type": "decoder",
            **({} if bos is None else {"bos_token_id": bos}),
            "eos_token_id": eos,
            "pad_token_id": _padding(folder, given, eos),
            "vocab_size": model["vocab_size"],
            "context_length": tokens if limited else max(tokens, NO_LIMIT),
            "decoder": {
                "filename": GRAPH,
                "session_options": session,
                "hidden_size": model["hidden_size"],
                "num_attention_heads": model["heads"],
                "num_hidden_layers": model["layers"],
                "num_key_value_heads": heads,
                "head_size": size,
                "inputs": {"input_ids": "input_ids", "attention_mask": "attention_mask", **templates["inputs"]},
                "outputs": {"logits": "logits", **templates["outputs"]},
            },
        },
        "search": {"do_sample": False, "max_length": tokens, "num_beams": 1, "past_present_share_buffer": True},
    }


def _padding(folder: Path, generation: dict[str, Any], eos: list[int]) -> int:
    """The token that genai takes for padding at the end of the prompts of a batch."""
    if (given := generation.get("pad_token_id")) is not None:
        return int(given)
    token = _json(folder / "tokenizer_config.json").get("pad_token")
    if token is not None:
        from tokenizers import Tokenizer

        found = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(
            token["content"] if isinstance(token, dict) else token
        )
        if found is not None:
            return int(found)
    return eos[0] if eos else 0


def _json(path: Path) -> dict[str, Any]:
    """A file's object; empty where there is no such file."""
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
