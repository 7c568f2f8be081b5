"""Checks of what StillAttention covers: rotary types, windows, attention variants; anything else raises an error that names it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from still_export.errors import ConfigError, UnsupportedModelError
from still_export.mixers.config import LayersConfig
from still_export.mixers.layers import MOST_ROWS, WINDOWED, head_size
from still_export.mixers.registry import MIXERS

SLIDING = "sliding_attention"
"""The families' name of layers with a window."""

STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "proportional")
"""Rotary types whose cos and sin depend on the position alone, so that prefill in pieces equals prefill at once."""


def check_family_config(config: Any, still: LayersConfig) -> None:
    """Raise UnsupportedModelError if the family configuration `config` describes attention that STILL cannot replace."""
    head_dim = head_size(config)
    if head_dim % 2 or head_dim < 2:
        raise _odd(config)
    check_heads(config)
    check_rope(config, getattr(config, "partial_rotation", False))
    _check_layers(config, still)
    _check_windows(config, still)


def check_heads(config: Any) -> None:
    """Raise UnsupportedModelError where key heads serve different numbers of query heads."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % kv_heads:
        raise UnsupportedModelError(
            f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads} in config.json; "
            "every key head must serve equally many query heads."
        )


def check_rope(config: Any, partial: bool = False) -> None:
    """Raise UnsupportedModelError for rotary positions that are not covered; `partial`: partial rotary positions are."""
    found = getattr(config, "rope_parameters", None) or {}
    kinds = [part for part in found.values() if isinstance(part, dict)]  # Gemma's layers with a window have their own
    for rope in kinds or [found]:
        _check_rope(config, rope, partial)


def _check_rope(config: Any, rope: dict[str, Any], partial: bool) -> None:
    kind = rope.get("rope_type", "default")
    if kind not in STATIC_ROPE_TYPES:
        raise UnsupportedModelError(
            f"rope_type={kind!r} in config.json; its angles depend on more than the position, so cached keys would be wrong. "
            f"Covered: {', '.join(STATIC_ROPE_TYPES)}. Set rope_parameters to one of them if the context allows it."
        )
    part = rope.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))
    if part not in (None, 1, 1.0) and not partial:
        raise UnsupportedModelError(
            f"partial_rotary_factor={part} in config.json; only rotation of all head_dim channels is covered (1.0)."
        )
    head_dim = head_size(config)
    turned = int(head_dim * (1.0 if part is None else part))
    if turned + turned % 2 > head_dim:
        raise _odd(config)


def _odd(config: Any) -> UnsupportedModelError:
    head_dim = getattr(config, "head_dim", None)
    fault = (
        f"head_dim={head_dim}"
        if head_dim
        else f"hidden_size={config.hidden_size} and num_attention_heads={config.num_attention_heads}"
    )
    return UnsupportedModelError(
        f"{fault} in config.json: heads of {head_size(config)} channels. Rotary positions pair channels, so their number must be even. "
        "This checkpoint cannot be read."
    )


def _check_layers(config: Any, still: LayersConfig) -> None:
    own = [name for name, mixer in MIXERS.items() if not mixer.of_families or (name == WINDOWED and _slides(config))]
    foreign = sorted(set(still.layer_types or ()) - set(own))
    if foreign:
        raise ConfigError(
            f"layer_types of still_config name {', '.join(foreign)}, which layers of other families are from the start; those of a "
            f"{config.model_type.removeprefix('still_')} model are {', '.join(own)}."
        )


def _slides(config: Any) -> bool:
    """Whether some layers, by the family's own names, have a window."""
    return SLIDING in (getattr(config, "layer_types", None) or ())


def with_windows(config: Any, still: LayersConfig) -> LayersConfig:
    """`still` with windowed layers where the family configuration `config` has them, because they read no far tokens.

    Raises:
        ConfigError: There are such layers, but no valid window.
    """
    types = getattr(config, "layer_types", None) or ()
    if not _slides(config) or len(still.layer_types or types) != len(types):  # the number of layers is checked later
        return still
    check_window(config)
    kinds = (WINDOWED if kind == SLIDING else still.layer_type(index) for index, kind in enumerate(types))
    return replace(still, layer_types=tuple(kinds))


def check_window(config: Any) -> None:
    """Raise ConfigError if a window is not valid."""
    window = config.sliding_window
    if not isinstance(window, int) or not 1 <= window <= MOST_ROWS:
        raise ConfigError(f"sliding_window={window} in config.json is outside 1..{MOST_ROWS}. Fix it.")


def _check_windows(config: Any, still: LayersConfig) -> None:
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    unknown = sorted(set(types or ()) - {"full_attention", SLIDING})
    if unknown:
        raise UnsupportedModelError(
            f"layer_types in config.json name {', '.join(unknown)}; covered: full_attention, {SLIDING}. (Which layers are hybrid is said "
            "by still_config.layer_types.)"
        )
    capacity = still.deployment.capacity(config)
    if window is not None and types is None and (window < capacity or still.deployment.overflow != "error"):
        raise UnsupportedModelError(
            f"sliding_window={window} in config.json is smaller than capacity_tokens={capacity}; STILL replaces full attention and "
            "would see tokens that the model never saw. Set sliding_window to null (and layer_types to full_attention) if the model "
            f'tolerates it, or capacity_tokens to at most {window} with overflow="error".'
        )


def check_attention(module: nn.Module, name: str, head_dim: int) -> None:
    """Raise UnsupportedModelError if the attention module `name` has parts that StillAttention lacks."""
    known = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"}
    parts = {child for child, _ in module.named_children()} | {
        child for child, _ in module.named_parameters(recurse=False)
    }
    missing, extra = sorted({"q_proj", "k_proj", "v_proj", "o_proj"} - parts), sorted(parts - known)
    if missing or extra:
        what = f"has no {', '.join(missing)}" if missing else f"has {', '.join(extra)}"
        raise UnsupportedModelError(
            f"{name} ({type(module).__name__}) {what}; StillAttention takes q/k/v/o_proj with or without bias, and q_norm and k_norm."
        )
    scaling = getattr(module, "scaling", head_dim**-0.5)
    if abs(scaling - head_dim**-0.5) > 1e-9:
        raise UnsupportedModelError(
            f"{name} scales its logits by {scaling}; only head_dim**-0.5 = {head_dim**-0.5:.6g} is covered."
        )
