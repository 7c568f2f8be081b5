"""onnxruntime-web: only standard and its own ops, low-bit weights dequantized once, in files small enough for browsers."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from still_export.errors import ConfigError, UnsupportedError
from still_export.graph.options import ExportOptions
from still_export.graph.quantization.policy import DEQUANTIZED, ONNXRUNTIME
from still_export.package.files import DATA, MODEL, RECORDED, recorded_text
from still_export.targets.ort.options import GenaiOptions
from still_export.targets.ort.target import FUSE, OWN_OPS, STRIP, attach_own_functions
from still_export.targets.target import Lowering, Target
from still_export.targets.web.chats import warn_of_chats
from still_graphs.conditions import no_functions, only_ops
from still_graphs.edits import graphs_of
from still_graphs.later_ir import ir
from still_graphs.passes.dequantize_at_load import dequantize_at_load, float32_products
from still_graphs.pipelines import Pass

PREFILL_TOKENS = 256
"""Tokens of one prefill call. The page responds between calls, and the memory of a call is never released."""

SHARD_BYTES = 256 << 20
"""Size of a file of weights. Browser buffers have at most 2 GB, and an interrupted download restarts at its shard."""

CONTRIB_OPS = (
    "CausalConvWithState",
    "FusedMatMul",
    "GatherBlockQuantized",
    "LinearAttention",
    "MatMulNBits",
    "SkipSimplifiedLayerNormalization",
)
"""Ops of com.microsoft in wasm of onnxruntime-web 1.30, which also has all of ai.onnx opset 23."""


@dataclass(frozen=True)
class WebOptions(GenaiOptions):
    """Options of ONNX Runtime's WebAssembly, which has no kernels of this project."""

    native: bool | None = field(default=False, init=False)
    cpu: str | None = field(default=None, init=False)
    onnxruntime_include: Path | None = field(default=None, init=False)


def demand(export_options: ExportOptions, options: WebOptions) -> None:
    """Raise ConfigError for options that a package for browsers does not support."""
    if export_options.adapters:
        raise ConfigError("--adapters: a browser's runner supports none; add one with --overlay, or export --to onnx.")
    if export_options.all_logits:
        raise ConfigError("--all-logits: a browser's runner reads the last token's logits; export --to onnx for all.")


def finish(lowering: Lowering, graph: Any) -> None:
    """Cut the weights into shards, and complete the manifest and the tokenizer's configuration."""
    lowering.manifest.update(
        target="web",
        prefill_tokens=lowering.options.prefill_tokens or PREFILL_TOKENS,
    )
    if quantization := lowering.manifest.get("quantization"):  # products do not round their inputs
        lowering.manifest["quantization"] = {**quantization, "nodes": DEQUANTIZED}
        fields = graph.metadata_props
        fields |= {key: recorded_text(lowering.manifest, name) for key, name in RECORDED.items() if key in fields}
        ir.save(graph, lowering.folder / MODEL)
    add_chat_template(lowering)
    warn_of_chats(lowering.manifest)
    if (lowering.folder / DATA).is_file():
        shard_weights(lowering, graph, SHARD_BYTES)


def add_chat_template(lowering: Lowering) -> None:
    """Copy the chat template into the tokenizer's configuration, where transformers.js 4 reads it."""
    template, config = (lowering.folder / name for name in ("chat_template.jinja", "tokenizer_config.json"))
    if template.is_file() and config.is_file():
        settings = json.loads(config.read_text(encoding="utf-8"))
        settings["chat_template"] = template.read_text(encoding="utf-8")
        config.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        lowering.changed.add(config.name)


def shard_weights(lowering: Lowering, graph: ir.Model, limit_bytes: int) -> int:
    """Cut a file of weights larger than `limit_bytes` into `model.onnx.1.data`, ..., and write the graph again.

    Tensors that share bytes stay together.

    Raises:
        UnsupportedError: A single tensor is larger.
    """
    source = lowering.folder / DATA
    if source.stat().st_size <= limit_bytes:
        return 0
    stored = [
        (value, tensor)
        for part in graphs_of(graph)
        for value in part.initializers.values()
        if isinstance(tensor := value.const_value, ir.ExternalTensor)
    ]
    lengths: dict[int, int] = {}
    for _, tensor in stored:
        lengths[tensor.offset or 0] = max(lengths.get(tensor.offset or 0, 0), tensor.length or 0)
    moved: dict[int, tuple[str, int]] = {}
    number, size = 0, limit_bytes + 1
    with source.open("rb") as weights:
        for offset, length in sorted(lengths.items()):
            if length > limit_bytes:
                raise UnsupportedError(
                    f"a weight has {length:,} bytes, a file for browsers {limit_bytes:,} at most: export with --quantize int4."
                )
            if size + length > limit_bytes:
                number, size = number + 1, 0
            name = f"{MODEL}.{number}.data"
            weights.seek(offset)
            with (lowering.folder / name).open("ab") as shard:
                shard.write(weights.read(length))
            moved[offset], size = (name, size), size + length
    for value, tensor in stored:
        value.const_value = ir.ExternalTensor(
            *moved[tensor.offset or 0],
            tensor.length,
            tensor.dtype,
            shape=tensor.shape,
            name=tensor.name,
            base_dir=lowering.folder,
        )
    source.unlink()
    ir.save(graph, lowering.folder / MODEL)
    return number


WEB = Target(
    "web",
    "web",
    ("float32",),
    ONNXRUNTIME,
    WebOptions,
    passes=(
        FUSE,
        STRIP,
        Pass(
            dequantize_at_load,
            "it has no kernel for low-bit weights: each call would dequantize them",
            requires=no_functions,
            ensures=float32_products,
        ),
        Pass(
            attach_own_functions,
            "its own ops are faster in bodies",
            requires=no_functions,
            ensures=only_ops(CONTRIB_OPS),
        ),
    ),
    finish=finish,
    lacks=("Experts",),
    traits=lambda options: (OWN_OPS,),
    demand=demand,
    dtype="float32",
    runtime="ort",
)
