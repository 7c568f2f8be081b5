"""A LoRA adapter for a package that accepts one at run time: its pairs as the package's inputs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from still_export.errors import ConfigError
from still_export.folders.model import ModelFolder
from still_export.models.read.checkpoint import open_tensors
from still_export.models.read.convert import merge_lora, names_in_base, plain_names
from still_export.models.read.weights import LORA_A, LORA_B, TOGETHER, Adapted, Deferred, Pair, value_of


def read_pairs(path: Path, manifest: Mapping[str, Any]) -> dict[str, tuple[Pair, ...]]:
    """The LoRA pairs of the adapter `path`, by the weight they adapt.

    Args:
        manifest: The manifest of a package exported with --adapters.

    Raises:
        ConfigError: The package accepts no adapter, or the adapter has more than LoRA or adapts other weights.
        CheckpointError, UnsupportedModelError: See `merge_lora`.
    """
    places = list((manifest.get("quantization") or {}).get("adapters") or ())
    if not places:
        raise ConfigError(f"--adapter {path}: the package was exported without --adapters, so it takes none.")
    folder = ModelFolder(path)
    if folder.adapter is None:
        raise ConfigError(f"--adapter {path} has no adapter_config.json. Give the folder that PEFT wrote.")
    tensors = plain_names(open_tensors(folder.weights))
    shapes = {
        name: torch.Size((outputs, place["inputs"]))
        for place in places
        for name, outputs in zip(place["weights"], place["outputs"], strict=True)
    }
    family = str(manifest["model"]["family"])
    in_base = names_in_base(shapes, family)
    for name in tensors:
        if "lora_" not in name:
            raise ConfigError(
                f"--adapter {path} holds {name}, which is no LoRA; only LoRA is exchanged while a package runs. Export with "
                f"--overlay {path}."
            )
        if in_base(target := f"{name.partition('.lora_')[0]}.weight") not in shapes:
            raise ConfigError(f"--adapter {path} adapts {target}, for which the package has no place.")
    empty = {
        name: Deferred(shape, torch.float32, _nothing, adapted=Adapted(None, ())) for name, shape in shapes.items()
    }
    merged = merge_lora({**empty, **tensors}, folder.adapter, str(path), family)
    return {
        name: weight.adapted.pairs
        for name, weight in merged.items()
        if isinstance(weight, Deferred) and weight.adapted is not None and weight.adapted.pairs
    }


def adapter_inputs(path: Path, manifest: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The adapter `path` as inputs of the package, float32 by name: A [K, R] and B [R, N] for each place, R the sum of its weights' ranks.

    Raises:
        ConfigError, CheckpointError, UnsupportedModelError: See `read_pairs`.
    """
    pairs = read_pairs(path, manifest)
    found: dict[str, np.ndarray] = {}
    for place in manifest["quantization"]["adapters"]:
        own = [(i, pair) for i, name in enumerate(place["weights"]) for pair in pairs.get(name, ())]
        if not own:
            continue
        rank, starts = sum(pair.a.shape[0] for _, pair in own), np.cumsum([0, *place["outputs"]])
        a, b = np.zeros((place["inputs"], rank), np.float32), np.zeros((rank, starts[-1]), np.float32)
        row = 0
        for i, pair in own:
            rows = slice(row, row + pair.a.shape[0])
            a[:, rows] = value_of(pair.a).float().t().numpy()
            b[rows, starts[i] : starts[i + 1]] = (value_of(pair.b).float().t() * pair.scale).numpy()
            row = rows.stop
        name = TOGETHER.join(place["weights"])
        found |= {f"{name}.{LORA_A}": a, f"{name}.{LORA_B}": b}
    return found


def adapter_digest(inputs: Mapping[str, np.ndarray]) -> str:
    """Digest of an adapter's numbers; states depend on them."""
    content = hashlib.sha256()
    for name, array in sorted(inputs.items()):
        content.update(f"{name} {array.shape}".encode() + array.tobytes())
    return content.hexdigest()


def _nothing() -> torch.Tensor:
    raise AssertionError("the base's values are the package's")
