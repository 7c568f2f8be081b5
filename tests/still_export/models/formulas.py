"""What is asked of a family whose definition stands in the tests: one token after the other, in float64."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from still_export.models.load import load_model
from still_export.package.folder import open_package
from tests.still_export.linear_models import linear_model
from tests.still_export.models.test_linear_families import LOGITS, PIECES, STATES, demand_steps, far, ids, pieces
from tests.still_export.proof.plants import with_weights
from tests.still_export.verbs import call

_calm: dict[str, tuple[int, Tensor, Any]] = {}


def _rounding(model: Any, draw: int) -> float:
    """How far the logits of a model's own float32 are from its float64, with weights moved a little at random: one draw says little."""
    generator = torch.Generator().manual_seed(draw)
    for name, x in model.tensors.items():
        model.tensors[name] = x * (1 + 2**-18 * torch.randn(x.shape, generator=generator)) if draw else x
    found = model(ids()).logits
    return far(found, model.double()(ids()).logits)


@torch.no_grad()
def calm(family: str, **changes: Any) -> tuple[int, Tensor, Any]:
    """Seed of a model whose own float32 is near its float64, and the logits and states of the latter.

    It is the first at a sixth of the bound, else the nearest of sixteen, or of up to 64 while none is at half: another order of the same
    sums, as on another processor, errs up to four times as much.
    """
    known = f"{family} {sorted(changes.items())}"
    nearest = math.inf
    for seed in range(0 if known in _calm else 64):
        expected = linear_model(family, seed=seed, **changes).double()(ids())
        distance = max(_rounding(linear_model(family, seed=seed, **changes), draw) for draw in range(3))
        if distance < nearest:
            nearest, _calm[known] = distance, (seed, expected.logits, expected.past_key_values)
        if nearest <= LOGITS / 6:
            break
    assert nearest <= LOGITS / 2 or nearest == math.inf, f"{known}: its own float32 loses too much of 64 random models"
    return _calm[known]


@torch.no_grad()
def demand_formulas(folder: Path, expected: Tensor, seen: Any) -> None:
    """The model of a folder has these logits and states: whole, in pieces and steps, of ragged rows, and written and read again."""
    ours = load_model(folder)
    assert far(ours(ids(), use_cache=False).logits, expected) <= LOGITS
    for sizes in (PIECES, [1, 2, 3, 2, 1, 127]):
        logits, cache = pieces(ours, ids(), sizes)
        assert far(logits, expected) <= LOGITS, sizes
        for index, states in enumerate(cache.states()):
            if "recurrent_state" in states:
                assert far(states["recurrent_state"], seen.get_recurrent_state(index)) <= STATES
            if "conv_state" in states:
                assert far(states["conv_state"], seen.get_conv_state(index)) <= STATES
    demand_steps(ours, ids()[:, :24], expected[:, :24])
    ours.save_pretrained(folder / "ours")
    again = load_model(folder / "ours")
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), again.parameters(), strict=True))


def demand_package(
    model: Any,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    *flags: str,
    short: bool = False,
    plant: tuple[tuple[str, ...], Callable[[Any], None]] | None = None,
) -> None:
    """It is exported and proven; and is not where the first weight whose name ends so is changed."""
    model.save_pretrained(folder / "model")
    assert call("export", folder / "model", "-o", folder / "package", "--quiet", *flags) == 0
    lengths, steps = ("1,65", "4") if short else ("1,130", "8")
    sizes = ("--lengths", lengths, "--decode-steps", steps, "--quiet")
    assert call("verify", folder / "package", *sizes) == 0, capsys.readouterr().out
    if plant is None:
        return
    ending, change = plant
    with_weights(
        open_package(folder / "package"),
        folder / "planted",
        lambda weights: change(weights[next(name for name in weights if name.endswith(ending))]),
    )
    assert call("verify", folder / "planted", *sizes) == 1


def add_half(weight: Any) -> None:
    """To the first two channels."""
    weight[..., :2] += 0.5
