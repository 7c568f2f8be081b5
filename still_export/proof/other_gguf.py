"""A GGUF file as the gguf package and transformers read it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from still_export.proof.reading import Reading, logits_of, too_large

ALIKE = ("llama", "qwen2", "qwen3")
"""Architectures whose GGUF tensors equal transformers', except for the order of llama's heads."""
_LAYER = "model.layers.{}."
_PARTS = (
    *(f"self_attn.{x}" for x in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
    *(f"mlp.{x}" for x in ("gate_proj", "up_proj", "down_proj")),
    *("input_layernorm", "post_attention_layernorm"),
)
_WHOLE = ("model.embed_tokens", "model.norm", "lm_head")


def read_gguf_tensors(path: Path, overlays: Sequence[Path]) -> Reading:
    """Tensors by the gguf package, under transformers' names by its own table; logits by transformers."""
    import gguf

    reader = gguf.GGUFReader(path)
    family = str(_value(reader, "general.architecture", ""))
    if overlays or family not in ALIKE or int(_value(reader, "split.count", 1)) > 1:
        what = (
            "an adapter is added to it" if overlays else f"its architecture ({family}) or its parts are read here alone"
        )
        return Reading("gguf", {}, why=[f"the GGUF file by another reader: {what}"])
    layers, heads = (int(_value(reader, f"{family}.{name}", 0)) for name in ("block_count", "attention.head_count"))
    groups = int(_value(reader, f"{family}.attention.head_count_kv", heads))
    arch = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == family)
    table = gguf.get_tensor_name_map(arch, layers)
    stems = [*_WHOLE, *(_LAYER.format(number) + part for number in range(layers) for part in _PARTS)]
    names = {known: stem for stem in stems if (known := table.get_name(stem)) is not None}
    tensors = {}
    for tensor in reader.tensors:
        stem, _, kind = tensor.name.rpartition(".")
        if stem not in names:
            continue
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        value = torch.from_numpy(np.array(values, np.float32)).reshape([int(n) for n in reversed(tensor.shape)])
        if family == "llama" and stem.endswith(("attn_q", "attn_k")):
            # llama.cpp rotates neighbouring channels, transformers those half a head apart.
            count = heads if stem.endswith("attn_q") else groups
            value = value.unflatten(0, (count, -1, 2)).transpose(1, 2).flatten(0, 2)
        tensors[f"{names[stem]}.{kind}"] = value
    logits, why = _logits(path, reader, family)
    return Reading("the gguf package", tensors, logits, why=why)


def _value(reader: Any, name: str, default: Any) -> Any:
    field = reader.get_field(name)
    return default if field is None else field.contents()


def _logits(path: Path, reader: Any, family: str) -> tuple[Callable[[Tensor], Tensor] | None, list[str]]:
    """transformers' logits; it ignores scaled positions, which are set by llama.cpp's rules."""
    from transformers import AutoModelForCausalLM

    kind, factor = (_value(reader, f"{family}.rope.scaling.{name}", None) for name in ("type", "factor"))
    factor = float(factor or _value(reader, f"{family}.rope.scale_linear", 0) or 1)
    reason = too_large(sum(int(tensor.n_elements) for tensor in reader.tensors))
    if kind not in (None, "none", "linear") or any(tensor.name == "rope_freqs.weight" for tensor in reader.tensors):
        reason = "transformers leaves out how the file scales positions"
    if reason:
        return None, [f"logits by another program: {reason}"]
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    except Exception as error:  # of whole libraries
        reason = " ".join(str(error).split())[:200]
        return None, [f"logits by another program: transformers cannot read the file ({reason})"]
    model = loaded.eval()
    if kind != "none" and factor != 1:
        theta = model.config.rope_parameters["rope_theta"]
        model.config.rope_parameters = {"rope_type": "linear", "factor": factor, "rope_theta": theta}
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    return logits_of(model), []
