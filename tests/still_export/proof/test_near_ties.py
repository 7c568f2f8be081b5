"""Another prompt is drawn where a near tie moved what follows, and only there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from still_export.models.description import describe_model
from still_export.package.folder import Package
from still_export.proof.cases import Case, row_errors
from still_export.proof.sessions import Target
from still_export.proof.tolerance import Bounds
from still_export.proof.verify import Judged, Verifier
from still_kernels.route.ties import RoutingTies
from still_kernels.select_blocks.ties import BlockTies
from still_kernels.ties import Choices, Ties
from tests.still_export.tiny import MIXED, still_model

OWN = {"logits": np.full((2, 1), 5e-3), "kind": np.full((2, 1), 1e9)}
"""Errors of PyTorch's own run: 0.005 is within the bounds, 0.5 is not."""


class Chooser:
    """An op whose choices are told by what the target says: 1 a near tie, 2 a wrong choice, 3 both."""

    score = "score"
    watched = ""

    def compare(self, pairs: Any, leads: Any, own: Any = ()) -> Choices:
        kinds = [actual["kind"][0] for _, actual in pairs]
        return Choices(len(kinds), sum(kind in (1, 3) for kind in kinds), sum(kind in (2, 3) for kind in kinds))

    def settle(self, pairs: Any, leads: Any, own: Any = (), turned: Any = None) -> Any:
        return pairs


def drawn(draws: list[tuple[int, float]] | list[tuple[int, int, float]]) -> int:
    """Number of the draw that is judged, of (kind of choice of each call, error of the target); with two calls the second is a step."""
    left = iter(enumerate(draws))

    class Draw(Case):
        def pairs(self, run: Any, ties: Any) -> Any:
            expected, pairs = np.ones((1, 50)), []
            for kind in self.kinds:
                actual = {"logits": expected + self.error, "kind": np.array([kind])}
                pairs.append(({"logits": expected, "kind": np.zeros(1)}, actual))
            return pairs, []

    class Draws:
        count, follows = 1, False

        def draw(self, numbers: Any, follow: Any = ()) -> list[Case]:
            number, (*kinds, error) = next(left)
            case = Draw("case", [], [], steps=(np.ones((1, 1)),) * (len(kinds) - 1), own=[OWN] * len(kinds))
            case.number, case.kinds, case.error = number, kinds, error  # type: ignore[attr-defined]
            return [case]

    verifier = Verifier.__new__(Verifier)
    verifier.by_token = {}
    verifier.ties, verifier.cases, verifier.target = Ties([Chooser()]), Draws(), Target(Package(Path(), {}))
    verifier.dtype, verifier.summed = "float16", set()
    first = verifier.cases.draw([0])
    ((_, case, *_),) = verifier._settled(None, first, Choices(), lambda name: None)  # type: ignore[arg-type]
    return int(case.number)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "draws, judged",
    [
        ([(1, 0.5), (0, 0.0)], 1),
        ([(1, 0.5), (0, 0.5)], 1),  # an error without a tie is one, and is judged
        ([(1, 0.005), (0, 0.0)], 0),  # what the tie moved is within the bounds
        ([(0, 0.5), (0, 0.0)], 0),
        ([(2, 0.5), (0, 0.0)], 0),  # a wrong choice is judged
        ([(1, 0.5)] * 4 + [(1, 0.7), (0, 0.0)], 4),  # there is an end
        ([(3, 0.005), (0, 0.0)], 1),  # a tie that others may follow from
        ([(3, 0.005)] * 4 + [(3, 0.0), (0, 0.0)], 4),
    ],
    ids=str,
)
def test_which_draw_is_judged(draws: list[tuple[int, float]], judged: int) -> None:
    assert drawn(draws) == judged


@pytest.mark.parametrize(
    "draws, judged",
    [
        ([(3, 0, 0.005), (0, 0, 0.0)], 1),  # a tie in the prompt, that others in the prompt may follow from
        ([(3, 1, 0.005), (1, 1, 0.0)], 1),
        ([(1, 2, 0.005), (0, 0, 0.0)], 0),  # steps begin at PyTorch's state: what is wrong in one is judged
        ([(3, 2, 0.005), (0, 0, 0.0)], 0),
        ([(2, 1, 0.005), (0, 0, 0.0)], 0),  # nothing ties in the prompt
    ],
    ids=str,
)
def test_which_draw_of_steps_is_judged(draws: list[tuple[int, int, float]], judged: int) -> None:
    assert drawn(draws) == judged


@pytest.mark.parametrize(("wrong", "tied", "passes"), [(8, 8, True), (8, 9, False), (9, 8, False), (10, 10, False)])
def test_rows_of_choices_that_nobody_tells_are_not_held(wrong: int, tied: int, passes: bool) -> None:
    """Tokens 6 to 9, of a sequence with two tokens of padding behind; 10 is none."""
    draw = np.random.default_rng(0)
    right = np.concatenate([draw.standard_normal((1, 4, 16)), np.zeros((1, 2, 16))], axis=1)
    found = right + 1e-3 * (right != 0) * draw.standard_normal(right.shape)
    found[0, wrong - 6] += 0.5
    lead = np.full((1, 12), np.inf)
    lead[0, tied], lead[0, 3] = 0.2, -0.9
    case = Case("case", [], [], leads={~1: np.full((1, 12), 5.0), ~0: lead})
    case.own = [{"logits": row_errors(right, right + 1e-3 * (right != 0))}]
    case.untold = Ties([RoutingTies()]).open_tokens(case.leads)
    assert case.open_tokens().sum() == 2
    call = {"logits": right, "present_length": np.array([10])}
    judged = Judged.of(case, [(call, {**call, "logits": found})])
    assert (Bounds([case], dtype="float16").judge(case, "logits", [judged.errors[0]["logits"]]).share <= 1) == passes


def test_choices_of_several_heads_are_of_one_token() -> None:
    leads = {~0: np.array([[9.0, 0.5, 9.0, 9.0, 9.0, 9.0]])}
    assert Ties([BlockTies(2)]).open_tokens(leads)[0].tolist() == [[True, False, False]]
    assert not Ties([Chooser()]).open_tokens(leads)  # what states show is compared by them


@pytest.mark.parametrize(("layer", "wrong", "passes"), [(1, 5, True), (0, 5, False), (1, 4, False), (2, 5, True)])
def test_rows_that_later_layers_keep_behind_untold_choices_are_not_held(layer: int, wrong: int, passes: bool) -> None:
    """Token 5 of nine ties in layer 0."""
    draw = np.random.default_rng(0)
    right = draw.standard_normal((1, 3, 9, 16))
    found = right + 1e-3 * draw.standard_normal(right.shape)
    found[0, 1, wrong] += 0.5
    lead = np.full((1, 9), np.inf)
    lead[0, 5] = 0.3
    name = f"present_key.{layer}"
    case = Case("case", [], [], leads={~0: lead}, own=[{name: row_errors(right, right + 1e-3)}])
    case.untold = Ties([RoutingTies()]).open_tokens(case.leads)
    errors = Judged.of(case, [({name: right}, {name: found})], {name: 2}).errors[0][name]
    assert (Bounds([case]).judge(case, name, [errors]).share <= 1) == passes


@pytest.mark.parametrize(("fault", "passes"), [("", True), ("all times 1.005", False), ("one times 1.01", False)])
def test_a_sum_of_alike_features_may_err_by_their_rounding(fault: str, passes: bool) -> None:
    """Each of 460 features near 0.63 falls to the same number of bfloat16: 0.4 of 290, where float16 errs by 0.03."""
    features = torch.rand(1, 9, 460, 64, generator=torch.Generator().manual_seed(0)) * 1e-3 + 0.6311
    right, own, found = (
        features.to(kind).float().sum(2).numpy() for kind in (torch.float32, torch.float16, torch.bfloat16)
    )
    if fault == "all times 1.005":
        found = found * 1.005
    elif fault:
        found[0, 3, 7] *= 1.01
    name = "present_z_state.3"
    case = Case("case", [], [], own=[{name: row_errors(right, own)}], own_mean={name: 1e-2})
    for rounds in (False, True):
        judged = Judged.of(case, [({name: right}, {name: found})], summed=[name] if rounds else ())
        report = judged.report(name, Bounds([case], 1.5))
        assert report.passed == (rounds and passes) and report.max_abs == pytest.approx(np.abs(found - right).max())


@pytest.mark.parametrize(("dtype", "coarse", "count"), [("float16", 1.5, 2), ("float16", 1.0, 0), ("float32", 1.5, 0)])
def test_only_gpus_in_float16_round_features(dtype: str, coarse: float, count: int) -> None:
    model = still_model("llama", torch.float32, layer_types=MIXED)
    manifest = describe_model(model)
    manifest = {**manifest, "model": {**manifest["model"], "dtype": dtype}}
    target: Any = SimpleNamespace(coarse=coarse)
    found = Verifier(Package(Path(), manifest), None, target).summed  # type: ignore[arg-type]
    assert len(found) == count and all(name.startswith("present_z_state.") for name in found)
