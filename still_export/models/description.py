"""A STILL model in the manifest's terms: ops, sizes, layers, states."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from still_export.mixers.cache import state_table
from still_export.mixers.layers import head_size
from still_export.mixers.registry import mixer_of

NOT_APPLIED: Mapping[str, Any] = {
    **{"repetition_penalty": 1, "no_repeat_ngram_size": 0, "min_length": 0, "num_beams": 1, "guidance_scale": 1},
    **dict.fromkeys(("bad_words_ids", "sequence_bias", "suppress_tokens", "begin_suppress_tokens", "stop_strings")),
    **dict.fromkeys(
        ("min_new_tokens", "forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty")
    ),
}
"""Settings that change greedy answers of transformers and of no program here, with their values of no effect."""


def warn_of_settings(generation: Any) -> None:
    """Warn about settings in NOT_APPLIED."""
    settings = {name: getattr(generation, name, None) for name in NOT_APPLIED}
    found = [
        f"{name}={value!r:.40}" for name, value in settings.items() if value not in (None, [], {}, NOT_APPLIED[name])
    ]
    if found:
        logging.getLogger(__name__).warning(
            "generation_config.json sets %s: the package keeps it for transformers, `run` and `serve` do not apply it",
            ", ".join(found),
        )


def describe_model(model: Any) -> dict[str, Any]:
    """The manifest's entries that follow from the model alone."""
    config, still = model.config, model.config.still
    layer_types = [still.layer_type(i) for i in range(config.num_hidden_layers)]
    used = [op.spec for i in range(config.num_hidden_layers) for op in mixer_of(config, i).ops(config, i)]
    used += [spec for module in model.modules() for spec in getattr(module, "specs", ())]
    states = state_table(config, model.dtype)
    eos = model.generation_config.eos_token_id
    ends = [] if eos is None else list(eos) if isinstance(eos, (list, tuple)) else [eos]
    return {
        "ops": {op.name: op.version for op in used},
        "model": {
            "family": config.model_type.removeprefix("still_"),
            "dtype": str(model.dtype).removeprefix("torch."),
            "parameters": sum(p.numel() for p in model.parameters()),
            "layers": config.num_hidden_layers,
            "hidden_size": config.hidden_size,
            "heads": config.num_attention_heads,
            "kv_heads": config.num_key_value_heads,
            "head_dim": head_size(config),
            "vocab_size": config.vocab_size,
            "layer_types": layer_types,
        },
        "still": still.to_dict(),
        "capacity": {"capacity_tokens": states.capacity_tokens, "bounded": states.bounded},
        "states": [state.to_dict() for state in states],
        **({"feeding": feeding} if (feeding := getattr(config, "feeding", None)) else {}),
        "eos_token_ids": [end for end in ends if end >= 0],  # a negative id means none
    }
