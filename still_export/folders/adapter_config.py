"""PEFT's adapter_config.json: only known settings are accepted; others are refused by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from still_export.errors import UnsupportedModelError
from still_export.folders.files import Adapter, read_checked, read_json

INERT = frozenset(
    (
        *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type"),
        *("exclude_modules", "layers_pattern", "layers_to_transform", "modules_to_save", "target_modules"),
        *("bias", "lora_dropout", "megatron_core", "qalora_group_size", "eva_config", "runtime_config"),
    )
)
"""Settings that change no weight: what was trained, and how; the tensors show which weights are adapted."""
UNDERSTOOD = frozenset(
    ("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights", "still_config")
)
MERGE = "Where PEFT can merge the adapter into its base (merge_and_unload), take the merged model."
STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights that leave the base unchanged; others subtract the pair's initial product."""


DEFAULTS = {"r": 8, "lora_alpha": 8}
"""PEFT's defaults."""


def read_adapter_config(path: Path) -> dict[str, Any]:
    """adapter_config.json at `path`.

    Raises:
        CheckpointError: It is damaged.
        UnsupportedModelError: It is no LoRA, or sets what is not understood.
    """
    kind = read_json(path).get("peft_type", "LORA")
    if kind != "LORA":
        raise UnsupportedModelError(f"{path}: peft_type is {kind!r:.40}; LORA is read. {MERGE}")
    values = read_checked(path, Adapter)
    start = values.get("init_lora_weights", True)
    known = INERT | UNDERSTOOD
    unknown = {n: v for n, v in values.items() if n not in known and v is not False and v not in (None, "", [], {})}
    if unknown:
        name, value = next(iter(unknown.items()))
        raise UnsupportedModelError(f"{path} sets {name} to {value!r:.60}, which is not understood here. {MERGE}")
    if start not in STARTS:
        raise UnsupportedModelError(f"{path}: init_lora_weights is {start!r:.40}, which also changes the base. {MERGE}")
    return {**DEFAULTS, **values}


def lora_scale(adapter: Mapping[str, Any], module: str, rank: int) -> float:
    """The factor of a module's pair. The pair has the rank, which `rank_pattern` may change."""
    patterns = adapter.get("alpha_pattern") or {}
    found = next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), None)
    alpha = float(adapter["lora_alpha"] if found is None else found)
    return alpha / (rank**0.5 if adapter.get("use_rslora") else rank)
