"""Convert other projects' tensor names: released STILL checkpoints, LoLCATs, LoRA adapters."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from still_export.errors import CheckpointError, UnsupportedModelError
from still_export.folders.adapter_config import lora_scale
from still_export.mixers.config import StillConfig
from still_export.mixers.layers import FULL, HYBRID
from still_export.models.families.fused import whole_pair
from still_export.models.families.linear_names import model_name
from still_export.models.read.checkpoint import in_range
from still_export.models.read.weights import (
    Adapted,
    Deferred,
    Pair,
    Weight,
    Weights,
    duplicate_error,
    exact_value_of,
    value_of,
)

_RELEASED = re.compile(r"(.*\.self_attn)\.feature_map_([qk])\.mlp\.linears\.(\d+)\.weight")
_HOUSEHOLDER = re.compile(r"(.*\.self_attn)\.feature_map_([qk])\.hh\.u")
_LOLCATS = re.compile(r"(.*\.self_attn)\.feature_map_([qk])\.mlp\.layer")
_WINDOW_FACTORS = re.compile(r"model\.layers\.(\d+)\.self_attn\.window_factors")
_LORA = re.compile(r"(.*)\.lora_([AB])(?:\.(?!bias$)[^.]+)?(?:\.weight)?")
_WRAPPED = re.compile(r"(?<![^.])_(?:orig_mod|fsdp_wrapped_module|checkpoint_wrapped_module|forward_module)\.")
"""Parts of names by torch.compile, FSDP, activation checkpointing and training frameworks, anywhere in a name."""
_OF_LANGUAGE = ("model.language_model.", "language_model.model.", "model.")
_LANGUAGE = re.compile("|".join(map(re.escape, _OF_LANGUAGE)))
W = TypeVar("W")
_PREFIXES = (
    ("base_model.model.", ""),
    ("model.model.", "model."),
    ("model.lm_head.", "lm_head."),
    ("model.backbone.", "backbone."),
)
_OF_BASE = ("layers.", "embed_tokens.", "norm.", "embedding_norm.", "embeddings.", "norm_f.", "final_layernorm.")
"""Prefixes of names in files of a model without its head, which lack "model."."""


def plain_names(tensors: Mapping[str, W]) -> dict[str, W]:
    """The family's names: wrappers of PEFT and training code removed, the base's prefix added where missing.

    Raises:
        CheckpointError: Two tensors have the same name then.
    """
    result: dict[str, W] = {}
    names: dict[str, str] = {}
    for stored, tensor in tensors.items():
        name = _WRAPPED.sub("", stored).removeprefix("module.")
        for prefix, plain in _PREFIXES:
            if name.startswith(prefix):
                name = plain + name.removeprefix(prefix)
        name = name.replace(".base_layer.", ".")
        name = f"model.{name}" if name.startswith(_OF_BASE) else name
        if name in result:
            raise duplicate_error(name, names[name], stored)
        result[name], names[name] = tensor, stored
    return result


def names_in_base(base: Collection[str], model_type: str = "") -> Callable[[str], str]:
    """Maps an adapter's names of weights to those of `base`; names without a counterpart stay.

    PEFT names modules of the class that it trained, which files of the same family may call otherwise (`backbone` and `model`). Two names
    mean the same weight if they become the same name of the model. The language model of a model with images has another prefix by itself.
    """
    to_model = model_name(model_type)
    by_model_name = {to_model(name): name for name in base}

    def find(name: str) -> str:
        if name in base:
            return name
        if (found := by_model_name.get(to_model(name))) is not None:
            return found
        match = _LANGUAGE.match(name)
        others = [] if match is None else [prefix + name[match.end() :] for prefix in _OF_LANGUAGE]
        return next((other for other in others if other in base), name)

    return find


def is_released(tensors: Mapping[str, Any]) -> bool:
    """Whether the feature maps have the names of the released STILL code."""
    return any(_RELEASED.fullmatch(name) for name in tensors)


def is_lolcats(tensors: Mapping[str, Any]) -> bool:
    """Whether the feature maps have the names of LoLCATs' published checkpoints."""
    return any(_LOLCATS.fullmatch(name) for name in tensors)


def fold_householder(weight: Tensor, u: Tensor, name: str = "weight") -> Tensor:
    """W' = W (I - 2 u u^T / |u|^2) per head: the reflection and the map that follows it as one matrix.

    Args:
        weight: [H, P, D].
        u: [H, D].
        name: Of the result, for messages.
    """
    wide, axis = weight.double(), u.double()
    squared = (axis * axis).sum(-1)[:, None, None]
    if bool((squared == 0).any()):
        raise CheckpointError(
            "a Householder vector (hh.u) is zero, so its reflection is undefined. The checkpoint is damaged. Fetch it again."
        )
    along = torch.einsum("hpd,hd->hp", wide, axis)
    return in_range(name, wide - 2 * along[..., None] * axis[:, None, :] / squared, weight.dtype)


def convert_released(tensors: Weights) -> dict[str, Weight]:
    """Tensors of a released STILL checkpoint under this package's names, Householder maps folded.

    Raises:
        CheckpointError: A head's map is missing.
    """
    result: dict[str, Weight] = {}
    maps: dict[tuple[str, str], dict[int, Tensor]] = {}
    axes: dict[tuple[str, str], Tensor] = {}
    for name, tensor in tensors.items():
        if match := _RELEASED.fullmatch(name):
            maps.setdefault((match[1], match[2]), {})[int(match[3])] = value_of(tensor)
        elif match := _HOUSEHOLDER.fullmatch(name):
            axes[match[1], match[2]] = value_of(tensor)
        else:
            result[name] = tensor
    for (module, side), heads in maps.items():
        if sorted(heads) != list(range(len(heads))):
            raise CheckpointError(
                f"{module}.feature_map_{side}.mlp.linears has the heads {sorted(heads)}; some are missing. Fetch the model again."
            )
        weight = torch.stack([heads[i] for i in range(len(heads))])
        axis = axes.pop((module, side), None)
        name = f"{module}.feature_{side}_weight"
        result[name] = weight if axis is None else fold_householder(weight, axis, name)
    if axes:
        raise CheckpointError(f"hh.u without the maps that follow it: {', '.join('.'.join(key) for key in axes)}.")
    return result


def layers_with_maps(tensors: Mapping[str, Any], layers: int) -> tuple[str, ...] | None:
    """`layer_types` of a converted checkpoint: full attention where a layer has no feature maps; None = all hybrid."""
    types = tuple(HYBRID if f"model.layers.{i}.self_attn.feature_q_weight" in tensors else FULL for i in range(layers))
    return types if FULL in types else None


def released_config(config: Mapping[str, Any], still: StillConfig | None = None) -> StillConfig:
    """The STILL configuration of a released checkpoint: config.json's, else `still`, else the training code's defaults."""
    known = {name: config[name] for name in ("chunk_size", "salient_per_chunk") if name in config}
    return replace(still or StillConfig(), profile="released", gate_bias=False, **known)


def released_family(config: Mapping[str, Any], tensors: Mapping[str, Any]) -> str:
    """The family of a checkpoint with model_type "still", by its tensors."""
    for key in ("base_model_type", "base_arch"):
        if isinstance(config.get(key), str):
            return config[key]
    if any(name.endswith("self_attn.q_norm.weight") for name in tensors):
        return "qwen3"
    biases = any(name.endswith("self_attn.q_proj.bias") for name in tensors)
    if biases and not any(name.endswith("self_attn.o_proj.bias") for name in tensors):
        return "qwen2"
    return "llama"


def convert_lolcats(tensors: Weights, still: StillConfig | None, layers: int) -> tuple[dict[str, Weight], StillConfig]:
    """Tensors of a LoLCATs checkpoint under this package's names, and its configuration.

    Its maps are [H, D, P] (column vectors), its window factors logits [1, H, 1, 1].

    Args:
        tensors: Merged base, distilled and fine-tuned tensors.
        still: Overrides what cannot be read from tensors (chunk_size, local, window_size); None = chunked with C = 64, LoLCATs' own.

    Raises:
        UnsupportedModelError: Maps with biases or adapters.
        CheckpointError: Window factors and feature maps are of different layers.
    """
    result: dict[str, Weight] = {}
    factors: dict[int, tuple[float, ...]] = {}
    rows = 0
    for name, tensor in tensors.items():
        if match := _LOLCATS.fullmatch(name):
            result[f"{match[1]}.feature_{match[2]}_weight"] = value_of(tensor).transpose(1, 2).contiguous()
            rows = tensor.shape[2]
        elif match := _WINDOW_FACTORS.fullmatch(name):
            factors[int(match[1])] = tuple(torch.sigmoid(exact_value_of(tensor).float().flatten()).tolist())
        elif ".feature_map_" in name:
            raise UnsupportedModelError(
                f"the LoLCATs checkpoint has {name}; only maps that are one matrix per head (mlp.layer) are covered."
            )
        else:
            result[name] = tensor
    types = layers_with_maps(result, layers)
    hybrid = [i for i in range(layers) if types is None or types[i] == HYBRID]
    if factors and sorted(factors) != hybrid:
        raise CheckpointError(
            f"window_factors exist for the layers {sorted(factors)}, feature maps for {hybrid}. Fetch the checkpoint again."
        )
    ones = (1.0,) * len(next(iter(factors.values()), ()))
    return result, replace(
        still or StillConfig(),
        salient_per_chunk=0,
        feature_map="softmax_pm",
        feature_dim=rows,
        gate="none",
        mix_epsilon=1e-12,  # LoLCATs has none; this keeps the derivative finite at padding
        window_factors=tuple(factors.get(i, ones) for i in range(layers)) if factors else None,
        layer_types=types,
    )


def merge_lora(
    tensors: Weights, adapter: Mapping[str, Any] | None, source: str, model_type: str = ""
) -> dict[str, Weight]:
    """Add every LoRA pair to its weight, lazily.

    Args:
        adapter: adapter_config.json with `lora_alpha` and `r`; None where the checkpoint has none.
        source: The files of the tensors, for messages.
        model_type: The family, whose names of weights the adapter may have in another form.

    Raises:
        CheckpointError: A pair is incomplete, fits no weight, or its scale is unknown.
        UnsupportedModelError: A tensor is of DoRA, a bias, or another form than plain LoRA.
    """
    pairs: dict[str, dict[str, Weight]] = {}
    result: dict[str, Weight] = {}
    for name, tensor in tensors.items():
        if match := _LORA.fullmatch(name):
            pairs.setdefault(match[1], {})[match[2]] = tensor
        elif "lora_" in name:
            raise UnsupportedModelError(f"{source}: {name} is no plain LoRA tensor; merge the adapter with PEFT first.")
        else:
            result[name] = tensor
    if not pairs:
        return result
    if adapter is None or adapter.get("lora_alpha") is None or not adapter.get("r"):
        raise CheckpointError(
            f"{source} has LoRA tensors ({next(iter(pairs))}) but no adapter_config.json with lora_alpha and r beside them, so "
            "their scale is unknown. Put the file there (LoLCATs trains with lora_alpha 16, r 8)."
        )
    in_base = names_in_base(result, model_type)
    for module, pair in pairs.items():
        target = in_base(f"{module}.weight")
        if module.endswith(".g_proj") and set(pair) == {"A", "B"} and target not in result:
            # A low-rank gate is only LoRA's product: a fresh gate's weight is zero and not stored.
            shape, dtype = torch.Size((pair["B"].shape[0], pair["A"].shape[1])), pair["B"].dtype
            zero = partial(torch.zeros, shape, dtype=dtype)
            result[target] = Deferred(shape, dtype, zero, adapted=Adapted(None, ()))
        if target not in result and "B" in pair and (whole := whole_pair(module, pair["B"], result)) is not None:
            target, pair["B"] = whole
        if set(pair) != {"A", "B"} or target not in result:
            what = (
                "fits no weight of the model"
                if target not in result
                else f"lacks lora_{'A' if 'A' not in pair else 'B'}"
            )
            raise CheckpointError(
                f"{source}: the LoRA pair of {module} {what}. The adapter belongs to another model or is incomplete."
            )
        weight = result[target]
        if pair["A"].dim() != 2 or pair["B"].dim() != 2 or pair["A"].shape[0] != pair["B"].shape[1]:
            raise CheckpointError(
                f"{source}: the LoRA pair of {module} has the shapes {list(pair['A'].shape)} and {list(pair['B'].shape)}, which do not "
                "fit each other. The adapter is damaged; fetch it again."
            )
        product = [pair["B"].shape[0], pair["A"].shape[1]]
        if product != list(weight.shape):
            raise CheckpointError(
                f"{source}: the LoRA pair of {module} gives {product}, the weight is {list(weight.shape)}. "
                "The adapter belongs to another model."
            )
        scale = lora_scale(adapter, module, pair["A"].shape[0])
        before = (weight.adapted if isinstance(weight, Deferred) else None) or Adapted(weight, ())
        result[target] = Deferred(
            weight.shape,
            weight.dtype,
            partial(_merged, target, weight, pair["A"], pair["B"], scale),
            adapted=Adapted(before.base, (*before.pairs, Pair(pair["A"], pair["B"], scale))),
        )
    return result


def _merged(name: str, weight: Weight, a: Weight, b: Weight, scale: float) -> Tensor:
    """`weight` + scale b a, computed in float32."""
    merged = exact_value_of(b).to(torch.float32) @ exact_value_of(a).to(torch.float32)
    merged.mul_(scale).add_(exact_value_of(weight).to(torch.float32))
    return in_range(name, merged, weight.dtype, " with its LoRA pair merged")
