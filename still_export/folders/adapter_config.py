"""PEFT's adapter_config.json, checked against the known fields; any other field with a value is refused by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from still_export.errors import UnsupportedModelError
from still_export.folders.files import Adapter, Files

INERT = frozenset(
    (
        *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type"),
        *("exclude_modules", "layers_pattern", "layers_to_transform", "modules_to_save", "target_modules"),
        *("bias", "lora_dropout", "megatron_core", "qalora_group_size", "eva_config", "runtime_config"),
    )
)
"""Fields that do not change weights; the adapter's tensors show which modules it has."""
UNDERSTOOD = frozenset(
    ("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights", "still_config")
)
MERGE = "If PEFT can merge the adapter into its base (merge_and_unload), use the merged model."
STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights that keep the base; others subtract the initial pair from it."""


DEFAULTS = {"r": 8, "lora_alpha": 8}
"""Defaults of PEFT."""


ADAPTER_CONFIG = "adapter_config.json"


def read_adapter_config(folder: Files) -> dict[str, Any]:
    """Read and check adapter_config.json of `folder`.

    Raises:
        CheckpointError: The file is damaged.
        UnsupportedModelError: It is not a LoRA, or has an unknown setting.
    """
    path, kind = folder.path / ADAPTER_CONFIG, folder.json(ADAPTER_CONFIG).get("peft_type", "LORA")
    if kind != "LORA":
        raise UnsupportedModelError(f"{path}: peft_type is {kind!r:.40}; only LORA is supported. {MERGE}")
    values = folder.json(ADAPTER_CONFIG, Adapter)
    start = values.get("init_lora_weights", True)
    known = INERT | UNDERSTOOD
    unknown = {n: v for n, v in values.items() if n not in known and v is not False and v not in (None, "", [], {})}
    if unknown:
        name, value = next(iter(unknown.items()))
        raise UnsupportedModelError(f"{path} sets {name} to {value!r:.60}, which is not supported. {MERGE}")
    if start not in STARTS:
        raise UnsupportedModelError(f"{path}: init_lora_weights is {start!r:.40}, which also changes the base. {MERGE}")
    return {**DEFAULTS, **values}


def lora_scale(adapter: Mapping[str, Any], module: str, rank: int) -> float:
    """Factor of a module's pair. `rank` comes from the pair, because `rank_pattern` may have changed it."""
    patterns = adapter.get("alpha_pattern") or {}
    found = next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), None)
    alpha = float(adapter["lora_alpha"] if found is None else found)
    return alpha / (rank**0.5 if adapter.get("use_rslora") else rank)
