"""Renames tensors of published checkpoints of linear families to transformers' names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from still_export.discovery import recognised
from still_export.errors import CheckpointError, ConfigError, StillExportError
from still_export.folders.families import AHEAD, AHEAD_FIELDS, NOT_LANGUAGE, TEXT_OF
from still_export.models.families.linear_families import LINEAR_FAMILIES
from still_export.models.families.softmax_families import Published
from still_export.models.read.weights import Deferred, Weight, Weights, duplicate_error, exact_value_of, value_of

_LANGUAGE = re.compile(r"^(model\.language_model|language_model\.model)\.")
_LAYER = re.compile(r"model\.layers\.(\d{1,6})\.")
_DERIVED = (*(f".self_attn.{name}" for name in ("slope_rate", "query_decay", "key_decay", "diagonal_decay")),)
"""Tensors of MiniMax that are computed from a layer's number."""
_OLMO_HYBRID = (("attention_layer_norm", "input_layernorm"), ("feedforward_layer_norm", "post_attention_layernorm"))
_MAMBA2 = (
    ("backbone.embeddings.", "model.embed_tokens."),
    ("backbone.embedding.", "model.embed_tokens."),
    ("backbone.norm_f.", "model.norm."),
    ("backbone.", "model."),
    ("model.embeddings.", "model.embed_tokens."),
    ("model.norm_f.", "model.norm."),
)
_KIMI = (
    *((f".self_attn.{x}", f".self_attn.forget_gate.{x}") for x in ("f_a_proj", "f_b_proj", "dt_bias", "A_log")),
    (".block_sparse_moe.", ".mlp."),
)
_BAILING = (
    ("model.word_embeddings.", "model.embed_tokens."),
    (".attention.", ".self_attn."),
    *((f".self_attn.{x}", f".self_attn.forget_gate.{x}") for x in ("f_proj", "dt_bias", "A_log")),
    (".self_attn.dense.", ".self_attn.o_proj."),
    (".mlp.gate.expert_bias", ".mlp.gate.e_score_correction_bias"),
)
_NAMES: dict[str, tuple[tuple[str, str], ...]] = {
    "olmo_hybrid": _OLMO_HYBRID,
    **dict.fromkeys(("mamba", "falcon_mamba", "mamba2", "mamba3"), _MAMBA2),
    "nemotron_h": _MAMBA2,
    "minimax": ((".block_sparse_moe.", ".mlp."),),
    "lfm3": ((".self_attn.gate_proj.", ".self_attn.g_proj."),),
    "kimi_linear": _KIMI,
    "bailing_hybrid": _BAILING,
}
_CONVOLUTIONS = re.compile(r"(.*)\.([qkvfi])_conv1d\.weight")
_LOWER_BOUNDS = "model.lower_bounds"


def language_model(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of the language model alone, also for models with a vision encoder.

    Raises:
        ConfigError: A value is missing, has another type, or contradicts another.
        UnsupportedModelError: A variant that is not covered.
    """
    config = {**config, "model_type": recognised(config)}
    family = LINEAR_FAMILIES.get(config["model_type"])
    if family is not None and (values := family.published.values) is not None:
        try:
            return values(config)
        except StillExportError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
            raise ConfigError(
                f"config.json is no valid {config['model_type']} configuration: {type(error).__name__}: {error}. Fix the named value."
            ) from error
    text = config.get("text_config")
    kind = TEXT_OF.get(config["model_type"])
    if kind is None or not isinstance(text, dict):
        return config
    inherited = {name: config[name] for name in ("tie_word_embeddings", "dtype", "torch_dtype") if name in config}
    return {**inherited, **text, "model_type": kind}


def model_name(model_type: str) -> Callable[[str], str]:
    """Maps names of a family's published tensors to the model's; the model's own stay."""
    kind = model_type.removeprefix("still_")
    published = LINEAR_FAMILIES[kind].published if kind in LINEAR_FAMILIES else Published()
    rename = published.renamed or partial(_renamed, parts=(*_NAMES.get(kind, ()), *published.names))
    return lambda name: rename(_LANGUAGE.sub("model.", name))


def published_names(
    model_type: str, tensors: Weights, config: Mapping[str, Any]
) -> tuple[dict[str, Weight], dict[str, dict[str, Weight]]]:
    """Returns (the language model's tensors under transformers' names, unused tensors by purpose).

    Raises:
        CheckpointError: A convolution lacks a part, or two tensors have the same name then.
    """
    kind = model_type.removeprefix("still_")
    published = LINEAR_FAMILIES[kind].published if kind in LINEAR_FAMILIES else Published()
    to_model = model_name(model_type)
    language: dict[str, Weight] = {}
    old_names: dict[str, str] = {}
    others: dict[str, dict[str, Weight]] = {}
    behind = config.get("num_hidden_layers") if any(config.get(name) for name in AHEAD_FIELDS) else None
    for name, tensor in tensors.items():
        new_name = to_model(name)
        what = next((what for begin, what in NOT_LANGUAGE.items() if name.startswith(begin)), None)
        if isinstance(behind, int) and (layer := _LAYER.match(new_name)) and int(layer[1]) >= behind:
            what = AHEAD
        if not what and published.unused:
            what = published.unused(new_name, config)
        if what:
            others.setdefault(what, {})[new_name] = tensor
        elif not name.endswith(_DERIVED):
            if new_name in language:
                raise duplicate_error(new_name, old_names[new_name], name)
            language[new_name], old_names[new_name] = tensor, name
    language = _bounded(_joined_convolutions(language))
    language = published.moved(language, config) if published.moved else language
    return published.tensors(language) if published.tensors else language, others


def _bounded(tensors: dict[str, Weight]) -> dict[str, Weight]:
    """Split HGRN2's shared bounds by layer: cumulative sums of a softmax over layers, without the first layer's share."""
    together = tensors.pop(_LOWER_BOUNDS, None)
    if together is None:
        return tensors
    layers, channels = together.shape
    for layer in range(1, layers):
        tensors[f"model.layers.{layer}.attn.lower_bound"] = Deferred(
            torch.Size((channels,)), together.dtype, partial(_lower_bound, together, layer)
        )
    return tensors


def _lower_bound(together: Weight, layer: int) -> Tensor:
    logits = exact_value_of(together)
    shares = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(0)
    return shares[1 : layer + 1].sum(0).to(together.dtype)


def _renamed(name: str, parts: Sequence[tuple[str, str]]) -> str:
    for old, new in parts:
        name = name.replace(old, new)
    return name


def _joined_convolutions(tensors: Weights) -> dict[str, Weight]:
    """Join separate convolutions of queries, keys and values."""
    result: dict[str, Weight] = {}
    parts: dict[str, dict[str, Weight]] = {}
    for name, tensor in tensors.items():
        if match := _CONVOLUTIONS.fullmatch(name):
            parts.setdefault(match[1], {})[match[2]] = tensor
        else:
            result[name] = tensor
    for module, found in parts.items():
        order = "qkv" if "f" not in found else "qfi" if "q" in found else "fi"
        if set(found) != set(order):
            raise CheckpointError(
                f"{module} has convolutions of {', '.join(sorted(found))} alone; expected {', '.join(order)}. Fetch the model again."
            )
        joined = [found[part] for part in order]
        shape = torch.Size((sum(x.shape[0] for x in joined), *joined[0].shape[1:]))
        result[f"{module}.conv1d.weight"] = Deferred(shape, joined[0].dtype, partial(_concatenated, joined))
    return result


def _concatenated(parts: list[Weight]) -> Tensor:
    return torch.cat([value_of(part) for part in parts])
