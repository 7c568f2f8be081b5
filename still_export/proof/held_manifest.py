"""What a manifest says of the model, held to the model itself: a program that reads it trusts sizes, layers and states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from still_export.errors import PackageError
from still_export.models.description import describe_model
from still_export.targets.registry import packaged_target
from still_graphs.states import AHEAD

if TYPE_CHECKING:
    from still_export.models.load import Source

DECIDED = ("dtype", "linearized", "all_logits")
"""Of `model`, what an export decides."""
HELD, PORTABLE = ("layer", "op", "growth"), ("shape", "in_place")
"""Of a state, what no target changes, and what engines have otherwise."""


def check_manifest(manifest: Mapping[str, Any], source: Source) -> None:
    """Compare what follows from the model `source` alone.

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
    if source.vision is not None and manifest.get("vision") is not None:
        pairs += [("vision", manifest["vision"], source.vision.said)]
    pairs += [("the names of states", sorted(states), sorted(state["name"] for state in right["states"]))]
    pairs += [
        (f"{name} of the state {state['name']}", states.get(state["name"], {}).get(name), state[name])
        for state in right["states"]
        for name in (*HELD, *PORTABLE * packaged_target(dict(manifest)).portable)
    ]
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
