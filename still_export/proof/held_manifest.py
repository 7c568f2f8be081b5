"""Compare the manifest's description of the model with the model: programs rely on its sizes, layers and states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from still_export.errors import PackageError
from still_export.mixers.cache import state_table
from still_export.models.description import describe_model
from still_export.targets.registry import packaged_target
from still_graphs.states import AHEAD

if TYPE_CHECKING:
    from still_export.models.load import Source

DECIDED = ("dtype", "linearized", "all_logits")
"""Fields of `model` that the export decides."""
FIXED, PORTABLE = ("layer", "op", "growth"), ("shape", "in_place")
"""Fields of a state that no target changes, and fields that engines change."""


def check_manifest(manifest: Mapping[str, Any], source: Source, dtype: str) -> None:
    """Compare the manifest with the model `source`, and with the export's own `config`.

    Args:
        dtype: The type in this `config`; for "auto" the type of the user's files.

    Raises:
        PackageError: A field is another model's.
    """
    right = describe_model(source.outline())
    states = {state["name"]: state for state in manifest["states"] if not state["name"].startswith(AHEAD)}
    pairs: list[tuple[str, Any, Any]] = [
        (f"{part}.{name}", manifest[part].get(name), value)
        for part in ("model", "still", "capacity")
        for name, value in right[part].items()
        if part != "model" or name not in DECIDED
    ]
    pairs += [(f"ops.{name}", manifest["ops"].get(name), version) for name, version in right["ops"].items()]
    untrained = bool(manifest["config"].get("attach_untrained"))
    pairs += [("model.linearized", manifest["model"].get("linearized"), not untrained)]
    pairs += [("feeding", manifest.get("feeding"), right.get("feeding"))]
    config, found = manifest["config"], manifest["model"]["dtype"]
    if config["dtype"] == "auto":
        pairs += [("model.dtype, of config.dtype='auto',", found, dtype)]
    else:
        pairs += [("config.dtype", config["dtype"], found)]
    pairs += [
        ("config.all_logits", config.get("all_logits"), manifest["model"].get("all_logits")),
        ("config.speculate", config.get("speculate", 0), manifest.get("speculate", 0)),
        ("config.quantize", config.get("quantize") is not None, manifest.get("quantization") is not None),
    ]
    if source.vision is not None and manifest.get("vision") is not None:
        pairs += [("vision", manifest["vision"], source.vision.settings)]
    pairs += [("the names of states", sorted(states), sorted(state["name"] for state in right["states"]))]
    pairs += [
        (f"{name} of the state {state['name']}", states.get(state["name"], {}).get(name), state[name])
        for state in right["states"]
        for name in (*FIXED, *PORTABLE * packaged_target(dict(manifest)).portable)
    ]
    if packaged_target(dict(manifest)).portable:
        types = {state.name: state.dtype for state in state_table(source.config, getattr(torch, found, torch.float32))}
        pairs += [(f"dtype of the state {name}", states[name].get("dtype"), types.get(name)) for name in states]
    wrong = next(_differences(pairs), "")
    if wrong:
        raise PackageError(f"manifest.json: {wrong}. Copy the package again, or export it again.")


def _differences(pairs: list[tuple[str, Any, Any]]) -> Iterator[str]:
    for name, found, right in pairs:
        if found == right:
            continue
        if isinstance(found, list) and isinstance(right, list):
            other = sorted(set(map(str, found)) ^ set(map(str, right)))
            yield (
                f"{name} are others than the model's: {', '.join(other[:4])}"
                if other
                else f"{name} are in another order"
            )
        else:
            yield f"{name} is {found!r}, the model's {right!r}"
