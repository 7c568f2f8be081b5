"""The adapter: feature maps, gates and LoRA in one small safetensors file, which `load_model` applies to a base as overlay."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from still_export.errors import CheckpointError, ConfigError
from still_export.folders.files import Adapter, Files
from still_export.linearization.recipe import Recipe
from still_export.mixers.config import StillConfig
from still_export.mixers.hybrid_attention.modes import window_factor
from still_export.mixers.layers import FULL, HYBRID
from still_export.mixers.projections import ProjectedAttention
from still_export.models.load import load_model
from still_export.models.read.checkpoint import in_range, iterate_tensors
from still_export.models.read.convert import plain_names
from still_export.models.read.rows import DIAGONAL, SCALE, int6_rows, int8_rows

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "g_proj")


FACTORS = ".window_factor_exponent"
UNTRAINED_FACTOR = 10_000.0
"""Window factor of layers with untrained feature maps. Their linear terms do harm, so they get nearly no weight."""


def own_marks(model: nn.Module) -> tuple[str, ...]:
    """Parts of names of parameters that a base does not have: feature maps, gates, scales."""
    modules = (m for m in model.modules() if isinstance(m, ProjectedAttention))
    return tuple(sorted({f".{start}" for module in modules for start in module.fresh}))


def still_parameters(model: nn.Module, gate_weights: bool = True) -> list[tuple[str, nn.Parameter]]:
    """Parameters that a base does not have, and learned window factors. Without `gate_weights`, only the biases of STILL's gates."""
    marks = (*own_marks(model), FACTORS)
    marks = marks if gate_weights else tuple(".g_proj.bias" if mark == ".g_proj." else mark for mark in marks)
    return [(n, p) for n, p in model.named_parameters() if "lora_" not in n and any(mark in n for mark in marks)]


def attach_lora(model: Any, recipe: Recipe) -> Any:
    """`model` with LoRA on the projections of its linearized layers, and everything else frozen."""
    from peft import LoraConfig, get_peft_model

    still, layers = model.config.still, range(model.config.num_hidden_layers)
    linearized = "|".join(str(i) for i in layers if still.layer_type(i) != FULL)
    config = LoraConfig(
        r=recipe.lora_rank,
        lora_alpha=recipe.lora_alpha,  # type: ignore[arg-type]  # a factor: PEFT divides it by the rank
        target_modules=rf".*\.layers\.({linearized})\.self_attn\.({'|'.join(LORA_TARGETS)})",
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT asks transformers for an attribute by its old name
        return get_peft_model(model, config)


def trained_tensors(module: nn.Module) -> dict[str, Tensor]:
    """New and LoRA parameters of an objective's model, gathered from all processes, under the family's names."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    found: dict[str, Any] = get_model_state_dict(module, options=options)
    tensors = plain_names({name.removeprefix("model."): tensor for name, tensor in found.items()})
    marks = (*own_marks(module), "lora_", FACTORS)
    trained = {n: t for n, t in tensors.items() if any(mark in n for mark in marks)}
    # Gates of low rank keep their initial weight, zero; LoRA's product is all of them.
    return {n: t for n, t in trained.items() if not n.endswith(".g_proj.weight") or bool(t.any())}


def take_window_factors(tensors: dict[str, Tensor], still: StillConfig, layers: int, heads: int) -> StillConfig:
    """Move learned window factors out of `tensors` into the configuration; layers without get 1."""
    found = {int(n.split(".layers.")[1].split(".")[0]): tensors.pop(n) for n in list(tensors) if n.endswith(FACTORS)}
    if not found:
        return still
    neutral = torch.zeros(heads)  # exponents: factors of 1
    return replace(
        still, window_factors=tuple(tuple(window_factor(found.get(i, neutral)).tolist()) for i in range(layers))
    )


def save_adapter(folder: Path, tensors: Mapping[str, Tensor], still: StillConfig, recipe: Recipe) -> None:
    """Write the adapter's weights (float16 or low-bit rows) and its configuration: PEFT's fields and the STILL configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = {}
    for name, loaded in tensors.items():
        tensor, few = loaded.detach(), recipe.adapter_dtype != "float16" and loaded.dim() > 1
        if few and recipe.adapter_dtype == "int6" and tensor.shape[-1] == tensor.shape[-2]:
            stored[name], stored[name + SCALE], stored[name + DIAGONAL] = int6_rows(tensor)
        elif few:
            stored[name], stored[name + SCALE] = int8_rows(tensor)
        else:
            stored[name] = in_range(name, tensor, torch.float16, " of the adapter")
    save_file({n: t.contiguous() for n, t in stored.items()}, folder / WEIGHTS, metadata={"format": "pt"})
    values = {
        "peft_type": "LORA",
        "base_model_name_or_path": Path(recipe.base).name if Path(recipe.base).exists() else recipe.base,
        "r": recipe.lora_rank,
        "lora_alpha": recipe.lora_alpha,
        "target_modules": list(LORA_TARGETS),
        "still_config": still.to_dict(),
    }
    (folder / CONFIG).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def read_adapter(folder: Path) -> tuple[dict[str, Any], StillConfig]:
    """The configuration of an adapter: PEFT's fields and the STILL configuration.

    Raises:
        CheckpointError: The folder has no adapter of a STILL model.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise CheckpointError(f"{folder} has no {CONFIG}, so it is no adapter. Give the folder that `linearize` wrote.")
    values = Files(folder).json(CONFIG, Adapter)
    if not isinstance(values.get("still_config"), dict):
        raise CheckpointError(
            f"{path} has no still_config, so it is no adapter of a STILL model. --adapter is the folder STILL/adapter that "
            "linearize writes."
        )
    return values, StillConfig.from_dict(values["still_config"], f"{path}: still_config")


def apply_adapter(base: str, folder: Path) -> Any:
    """The STILL model of a base and an adapter, with LoRA merged.

    Raises:
        CheckpointError: The folder has no adapter of a STILL model, or one of another base.
    """
    read_adapter(folder)
    return load_model(base, overlays=[folder])


class Start:
    """The starting point of a run: an adapter's tensors for the hybrid layers, and its window factors.

    Args:
        recipe: Its `start` names the adapter.

    Raises:
        CheckpointError: The folder has no adapter of a STILL model.
        ConfigError: Feature map or LoRA of recipe and adapter differ.
    """

    def __init__(self, recipe: Recipe) -> None:
        folder = Path(str(recipe.start))
        values, self.still = read_adapter(folder)
        mine = {"r": recipe.lora_rank, "lora_alpha": recipe.lora_alpha, "feature_map": recipe.feature_map}
        recorded = {"r": values.get("r"), "lora_alpha": values.get("lora_alpha"), "feature_map": self.still.feature_map}
        made = sorted(set(self.still.layer_types or (HYBRID,)) - {FULL, recipe.layer})
        if made:
            raise ConfigError(
                f"the adapter {folder} has layers of type {', '.join(made)}, --mixer {recipe.mixer} makes {recipe.layer}; they "
                "must be equal."
            )
        for name, value in mine.items():
            if value != recorded[name]:
                raise ConfigError(
                    f"the adapter {folder} has {name} {recorded[name]}, the recipe {value}; they must be equal."
                )
        self.trains_maps = bool(recipe.transfer_steps) or recipe.maps_in_finetune
        softmax = [i for i, kind in enumerate(recipe.layer_types or ()) if kind == FULL]
        self.tensors = {
            name: tensor
            for name, tensor in iterate_tensors(folder / WEIGHTS)
            if not any(f".layers.{i}." in name for i in softmax)
        }

    def new_layers(self, still: StillConfig, layers: int) -> list[int]:
        """Of `layers` layers, those that `still` linearizes and the adapter left softmax."""
        return [i for i in range(layers) if still.layer_type(i) != FULL and self.still.layer_type(i) == FULL]

    def window_factors(self, still: StillConfig, layers: int) -> tuple[tuple[float, ...], ...] | None:
        """The adapter's factors, per layer and query head. New layers get the median of the others if their maps will be trained."""
        rows, new = self.still.window_factors, self.new_layers(still, layers)
        trained = [f for i, row in enumerate(rows or ()) if self.still.layer_type(i) != FULL for f in row]
        if rows is None or not trained:
            return rows
        middle = median(trained) if self.trains_maps else UNTRAINED_FACTOR
        return tuple((middle,) * len(row) if i in new else row for i, row in enumerate(rows))

    def still_tensors(self) -> dict[str, Tensor]:
        """Parameters that a base does not have, under the names of a STILL model."""
        return {n: t for n, t in self.tensors.items() if "lora_" not in n}

    def load_lora(self, model: Any) -> None:
        """Load the adapter's LoRA into a PEFT model.

        Raises:
            CheckpointError: A shape differs, so the adapter belongs to another base.
        """
        load_lora(model, self.tensors)


def load_lora(model: Any, tensors: Mapping[str, Tensor]) -> None:
    """Load the LoRA in `tensors` (the family's names) into a PEFT model; errors: see `load_tensors`."""
    load_tensors(model, {f"base_model.model.{n}": t for n, t in tensors.items() if "lora_" in n})


def load_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load `tensors` into the parameters of the same names; other parameters stay.

    Raises:
        CheckpointError: A shape differs.
    """
    try:
        model.load_state_dict(dict(tensors), strict=False)
    except RuntimeError as error:
        raise CheckpointError(
            f"the adapter belongs to another base model: {str(error).splitlines()[-1].strip()}"
        ) from error
