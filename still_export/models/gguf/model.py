"""A GGUF file as a model of transformers: config.json and tensors under published names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from still_export.errors import CheckpointError, UnsupportedModelError
from still_export.models.gguf.container import open_gguf
from still_export.models.gguf.ends import token_ids
from still_export.models.gguf.hybrids import HYBRIDS
from still_export.models.gguf.mamba import MAMBA
from still_export.models.gguf.shared import BLOCK, Architecture, Config, View
from still_export.models.gguf.softmax import SOFTMAX
from still_export.models.gguf.tensors import AS_IT_IS, Edit, Stored, stack, weight, zeros
from still_export.models.read.weights import Deferred

ARCHITECTURES: dict[str, Architecture] = {**SOFTMAX, **HYBRIDS, **MAMBA}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.sliding_window": (0,),
    "final_logit_softcapping": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "router_logit_softcapping": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_shared_count": (0, 1),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_weights_scale": (0.0, 1.0),
    "expert_gating_func": (0, 1),
    "expert_feed_forward_length": (0,),
    "expert_shared_feed_forward_length": (0,),
    "use_parallel_residual": (False,),
    "ssm.dt_b_c_rms": (False,),
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.finetuned": (True, False),
    "tensor_data_layout": ("reference", "Meta AI original pth"),
}
"""Values of keys that change nothing for an architecture that has no such thing."""
_LEAVES = ("A_log", "D", "dt_bias", "bias", "expert_bias", "e_score_correction_bias", "x_x", "k_k", "k_a", "r_k", "x_k")
"""Ends of names of parameters that have no `.weight` behind them."""
_ROPE_TABLE = "rope_freqs.weight"


def read_gguf(path: Path, dtype: torch.dtype = torch.float32) -> tuple[str, Config, dict[str, Deferred]]:
    """A GGUF file, or all parts of a split one, as a model.

    Returns:
        transformers' model_type, the values of config.json, and the tensors by published names as `dtype`, dequantized when they are read.

    Raises:
        CheckpointError: The file is damaged; when a tensor is read, it has a quantization that cannot be undone.
        UnsupportedModelError: Its architecture, a key that changes numbers or a tensor is not covered.
    """
    file = open_gguf(path)
    architecture = ARCHITECTURES.get(file.architecture)
    if architecture is None:
        raise UnsupportedModelError(
            f"{path} has architecture {file.architecture!r}; GGUF files of {', '.join(ARCHITECTURES)} are read. "
            "Use the model's Hugging Face folder if its family is covered."
        )
    view = View(file)
    config = architecture.config(view)
    _refuse_unread(view)
    config |= token_ids(file, config["vocab_size"])
    tensors = _tensors(view, architecture, config, dtype)
    return config["model_type"], config, tensors


def _refuse_unread(view: View) -> None:
    for name, value in view.keys.unread():
        neutral = _NEUTRAL.get(name, ())
        values = value if isinstance(value, list) else [value]
        if not all(any(one == known for known in neutral) for one in values):
            raise view.refuse(f"{view.keys.prefix}{name}={str(value)[:60]}, a key that may change numbers")


def _tensors(view: View, architecture: Architecture, config: Config, dtype: torch.dtype) -> dict[str, Deferred]:
    edits = architecture.edits(view, config)
    owners = {part: target for target, parts in architecture.joined.items() for part in parts}
    pieces: dict[str, dict[str, Stored]] = {}
    found: dict[str, Deferred] = {}
    for name, tensor in view.file.tensors.items():
        if name == _ROPE_TABLE or (architecture.skipped and re.fullmatch(architecture.skipped, name)):
            continue
        stored, (prefix, part) = Stored(tensor, str(view.file.path)), _place(view, name)
        if prefix and (owner := owners.get(part)) is not None:
            pieces.setdefault(f"{prefix}{owner}", {})[part] = stored
            continue
        target = _target(view, architecture, prefix, part, name)
        full = _named(prefix, target, part)
        edit = AS_IT_IS if target in architecture.joined else edits.get(target, AS_IT_IS)  # a file that has it whole
        if full == f"{prefix}{target}.bias":
            edit = Edit(edit.rows)
        if "{}" in target:
            experts = range(stored.shape[0]) if len(stored.shape) == 3 else ()
            for number in experts:
                one = full.format(number)
                found[one] = weight(one, [Stored(tensor, stored.origin, number)], dtype)
        elif len(stored.shape) == 3 and ".experts." in target:
            found[full.removesuffix(".weight")] = stack(full, stored, dtype)
        else:
            found[full] = weight(full, [stored], _kind(full, dtype), edit)
    for name, parts in pieces.items():
        target = next(t for t in architecture.joined if name.endswith(t))
        found[f"{name}.weight"] = _joined(view, name, target, architecture, parts, edits, dtype)
    return found | _missing_biases(view, architecture, found, dtype)


def _kind(name: str, dtype: torch.dtype) -> torch.dtype:
    """What decides which experts are asked is float32 in a model of any type."""
    return torch.float32 if name.endswith(("expert_bias", "e_score_correction_bias")) else dtype


def _place(view: View, name: str) -> tuple[str, str]:
    """Where a tensor lies: "model.layers.N." or "", and its name there without `.weight`. Layers that guess tokens ahead come last."""
    match = BLOCK.fullmatch(name)
    if match is None:
        return "", name.removesuffix(".weight")
    layer = int(match[1])
    part = match[2].removesuffix(".weight")
    if layer < view.layers:
        return f"model.layers.{layer}.", part
    return f"mtp.layers.{layer - view.layers}.", part


def _target(view: View, architecture: Architecture, prefix: str, part: str, name: str) -> str:
    """transformers' name of a tensor, without its layer and `.weight`.

    Raises:
        UnsupportedModelError: It has none.
    """
    table = architecture.parts if prefix else architecture.whole
    if (target := table.get(part)) is not None:
        return target
    if prefix.startswith(
        "mtp."
    ):  # of layers that guess tokens ahead, which are left out where the family has no place for them
        return part
    base = part.removesuffix(".bias")
    if base != part and base in table and _takes_bias(architecture, base):
        return table[base]
    raise view.refuse(f"the tensor {name}, which has no place in the family")


def _takes_bias(architecture: Architecture, part: str) -> bool:
    """Whether a projection may have a bias: those of no group may, where the family's class says so later."""
    grouped = {name for group in architecture.biases for name in group}
    return part in grouped or not (grouped and part.startswith(("attn_", "ffn_")))


def _named(prefix: str, target: str, part: str) -> str:
    if target.startswith("mtp."):
        prefix = ""
    if target.rpartition(".")[2] in _LEAVES:
        return f"{prefix}{target}"
    return f"{prefix}{target}.{'bias' if part.endswith('.bias') else 'weight'}"


def _joined(
    view: View,
    name: str,
    target: str,
    architecture: Architecture,
    parts: Mapping[str, Stored],
    edits: Mapping[str, Edit],
    dtype: torch.dtype,
) -> Deferred:
    held = [parts[part] for part in architecture.joined[target] if part in parts]
    if len(held) != 2:
        raise CheckpointError(
            f"{view.file.path} has {', '.join(parts)} alone of what {name} is made of. It is incomplete; fetch it again."
        )
    return weight(name, held, dtype, edits.get(target, AS_IT_IS))


def _missing_biases(
    view: View, architecture: Architecture, found: Mapping[str, Deferred], dtype: torch.dtype
) -> dict[str, Deferred]:
    """Zeros for projections without a bias where others of their group have one, in any layer."""
    added = {}
    always = architecture.biases if view.file.architecture == "qwen2" else ()
    for group in architecture.biases:
        if group not in always and not any(f"{part}.bias" in view.parts for part in group):
            continue
        for part in group:
            for layer in range(view.layers):
                base = f"model.layers.{layer}.{architecture.parts[part]}"
                if f"{base}.bias" not in found and f"{base}.weight" in found:
                    added[f"{base}.bias"] = zeros(found[f"{base}.weight"].shape[0], dtype)
    return added
