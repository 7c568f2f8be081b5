"""A package for onnxruntime-genai: one more graph over the same weights, and a configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from still_export.errors import ConfigError, UnsupportedError
from still_export.graph.options import ExportOptions
from still_export.targets.genai.chats import warn_of_chats
from still_export.targets.genai.join_states import (
    CACHE,
    RECURRENT,
    check_states,
    join_states,
    joined_states,
    past_name,
    present_name,
)
from still_export.targets.genai.take_lengths_from_mask import lengths_from_mask, take_lengths_from_mask
from still_export.targets.ort.target import check as check_ort
from still_export.targets.ort.target import finish as finish_ort
from still_export.targets.target import Lowering
from still_graphs.conditions import bodies
from still_graphs.later_ir import ir
from still_graphs.pipelines import Pass, run_passes
from still_graphs.states import StateTable
from still_kernels.attention.spec import ATTENTION

GRAPH = "genai.onnx"
CONFIG = "genai_config.json"
NO_LIMIT = 1 << 20
"""`context_length` of models with a state of constant size."""


PASSES = (
    Pass(join_states, "it keeps two tensors of fixed size a layer", requires=bodies, ensures=joined_states),
    Pass(
        take_lengths_from_mask,
        "it gives an attention mask, and no lengths",
        requires=joined_states,
        ensures=lengths_from_mask,
    ),
)
"""Applied to the graph for ONNX Runtime."""


def demand_genai(export_options: ExportOptions, options: Any) -> None:
    """Raise ConfigError for options that a package for genai does not support."""
    if export_options.adapters:
        raise ConfigError("--adapters: genai has no inputs for adapters; add one with --overlay, or export --to onnx.")
    if export_options.all_logits:
        raise ConfigError("--all-logits: genai reads the last token's logits only; for all of them export --to onnx.")
    if export_options.dtype == "bfloat16":
        raise ConfigError("--dtype bfloat16: packages for genai run on the CPU, which has float32 and float16.")


def check_genai(manifest: dict[str, Any], options: Any) -> None:
    """Raise for types that ONNX Runtime's kernels do not compute, and for caches and states that genai does not support."""
    check_ort(manifest, options)
    if manifest["still"].get("cache") == "int8" and ATTENTION.name in manifest["ops"]:
        raise UnsupportedError(
            "--cache int8: genai stores no scales beside the keys and values of softmax layers, which this model has; "
            "for genai export it with --cache float16."
        )
    check_states(StateTable.of(manifest))


def finish(lowering: Lowering, graph: Any) -> None:
    """Write the content of a package for ONNX Runtime, genai's graph over its weights, and genai's configuration."""
    finish_ort(lowering, graph)
    lowering.say("joining the states for genai")
    run_passes(graph, PASSES, lowering.dump)
    ir.save(graph, lowering.folder / GRAPH)
    shapes = {str(v.name): [d for d in v.shape or () if isinstance(d, int)] for v in graph.graph.inputs}
    config = genai_config(lowering.folder, lowering.manifest, shapes)
    (lowering.folder / CONFIG).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    lowering.manifest["target"] = "genai"
    warn_of_chats(lowering.folder, lowering.manifest)


def genai_config(folder: Path, manifest: dict[str, Any], shapes: dict[str, list[int]]) -> dict[str, Any]:
    """The content of genai_config.json.

    Args:
        folder: Package with tokenizer and generation configuration.
        shapes: Dimensions of the inputs of its graph for genai, without the batch.
    """
    model, capacity = manifest["model"], manifest["capacity"]
    tokens = int(capacity["capacity_tokens"])
    heads, rows, size = next(shape for name, shape in shapes.items() if name.endswith(f".{CACHE[0]}"))
    limited = capacity["bounded"] or rows > 1  # softmax layers store a row for every token
    generation = _json(folder / "generation_config.json")
    eos = manifest["eos_token_ids"]
    session: dict[str, Any] = {"log_id": "still-export", "provider_options": []}
    if native := manifest.get("native"):
        session["custom_ops_library"] = native["library"]
    names = {"inputs": ("past", past_name), "outputs": ("present", present_name)}
    templates = {
        part: {f"{side}_{key.removesuffix('_state')}_names": of("%d", key) for key in (*CACHE, *RECURRENT)}
        for part, (side, of) in names.items()
    }
    bos = generation.get("bos_token_id")
    return {
        "model": {
            "type": "decoder",
            **({} if bos is None or bos < 0 else {"bos_token_id": bos}),
            "eos_token_id": eos,
            "pad_token_id": _padding(folder, generation, eos),
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
    """The padding token that genai puts after the prompts of a batch."""
    if (padding := generation.get("pad_token_id")) is not None and padding >= 0:
        return int(padding)
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
    """The JSON object in a file; {} if the file does not exist."""
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
