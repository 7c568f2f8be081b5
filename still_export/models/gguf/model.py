"""A GGUF file as a model of transformers: config.json and tensors under published names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from still_export.errors import CheckpointError
from still_export.gguf.architectures import ROPE_TABLE, place, read_config, target_of
from still_export.gguf.edits import AS_IT_IS, Edit
from still_export.gguf.shared import Architecture, Config, View
from still_export.models.gguf.tensors import Stored, stack, weight, zeros
from still_export.models.read.weights import Deferred

_LEAVES = (
    *("A_log", "D", "dt_bias", "bias", "expert_bias", "e_score_correction_bias", "x_x", "k_k", "k_a", "r_k", "x_k"),
    *("time_faaaa", "time_decay", "time_decay_w1", "time_decay_w2", "time_maa_w1", "time_maa_w2"),
    *(f"time_maa_{part}" for part in "xwkvrg"),
)
"""Suffixes of parameters that do not end with `.weight`."""


def read_gguf(path: Path, dtype: torch.dtype = torch.float32) -> tuple[str, Config, Config, dict[str, Deferred]]:
    """A GGUF file, or all parts of a split one, as a model.

    Returns:
        transformers' model_type, the values of config.json and of generation_config.json, and the tensors by published names as `dtype`,
        dequantized when they are read.

    Raises:
        CheckpointError: The file is damaged; when a tensor is read, it has a quantization that cannot be undone.
        UnsupportedModelError: Its architecture, a key that changes numbers or a tensor is not covered.
    """
    view, architecture, config = read_config(path)
    tensors = _tensors(view, architecture, config, dtype)
    tokens = {name: config.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return config["model_type"], config, {**tokens, **view.file.sampling}, tensors


def _tensors(view: View, architecture: Architecture, config: Config, dtype: torch.dtype) -> dict[str, Deferred]:
    edits = architecture.edits(view, config)
    owners = {part: target for target, parts in architecture.joined.items() for part in parts}
    pieces: dict[str, dict[str, Stored]] = {}
    found: dict[str, Deferred] = {}
    for name, tensor in view.file.tensors.items():
        if name == ROPE_TABLE or architecture.skips(name):
            continue
        stored = Stored(tensor, str(view.file.path), factors=view.file.scale(name))
        prefix, part = place(view, name, architecture.stem)
        if prefix and (owner := owners.get(part)) is not None:
            pieces.setdefault(f"{prefix}{owner}", {})[part] = stored
            continue
        if prefix and (names := architecture.split.get(part)) is not None:
            for number, one in enumerate(names):
                found[f"{prefix}{one}"] = weight(one, [replace(stored, expert=number)], dtype, edits[one])
            continue
        target = target_of(view, architecture, prefix, part, name)
        full = _named(prefix, target, part)
        edit = (
            AS_IT_IS if target in architecture.joined else edits.get(f"{prefix}{target}", edits.get(target, AS_IT_IS))
        )  # a file that has it as a whole
        if full == f"{prefix}{target}.bias":
            edit = Edit(edit.rows)
        if "{}" in target:
            experts = range(stored.shape[0]) if len(stored.shape) == 3 else ()
            for number in experts:
                one = full.format(number)
                found[one] = weight(one, [replace(stored, expert=number)], dtype)
        elif len(stored.shape) == 3 and ".experts." in target:
            found[full.removesuffix(".weight")] = stack(full, stored, dtype)
        else:
            found[full] = weight(full, [stored], _kind(full, dtype), edit)
    for name, parts in pieces.items():
        target = next(t for t in architecture.joined if name.endswith(t))
        found[f"{name}.weight"] = _joined(view, name, target, architecture, parts, edits, dtype)
    return found | _missing_biases(view, architecture, found, dtype)


def _kind(name: str, dtype: torch.dtype) -> torch.dtype:
    """float32 for parameters that select experts, else `dtype`."""
    return torch.float32 if name.endswith(("expert_bias", "e_score_correction_bias")) else dtype


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
    stored = [parts[part] for part in architecture.joined[target] if part in parts]
    if len(stored) != 2:
        raise CheckpointError(
            f"{view.file.path} has {', '.join(parts)} alone of what {name} is made of. It is incomplete; fetch it again."
        )
    return weight(name, stored, dtype, edits.get(target, AS_IT_IS))


def _missing_biases(
    view: View, architecture: Architecture, found: Mapping[str, Deferred], dtype: torch.dtype
) -> dict[str, Deferred]:
    """Zero biases for projections without one if others of their group have one in any layer."""
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
