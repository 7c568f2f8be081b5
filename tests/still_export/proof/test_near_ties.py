"""Another prompt is drawn where a near tie of half precision moved what follows, and only there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from still_export.proof.cases import Case, Noise
from still_export.proof.excuses import Choices, Excuses
from still_export.proof.verify import Verifier

NOISE = {"logits": Noise(1e-2, 1e-3, 2e-2, 4e-3)}


class Chooser:
    """An op whose choices are told by what the target's logits begin with: 1 a near tie, 2 a wrong choice, 3 both."""

    score = "score"

    def compare(self, pairs: Any, leads: Any, ties: Any) -> Choices:
        if not pairs:
            return Choices()
        kind = pairs[0][1]["logits"][0, 0]
        return Choices(1, int(kind in (1, 3)), int(kind in (2, 3)))

    def settle(self, pairs: Any, leads: Any, ties: Any) -> Any:
        return pairs

    def leads(self, reference: Any, tokens: Any, counts: Any) -> Any:
        return {}


def drawn(draws: list[tuple[int, float]], noise: dict[str, Noise]) -> int:
    """Number of the draw that is judged, of (kind of choice, error of the target)."""
    left = iter(enumerate(draws))

    class Draw(Case):
        def pairs(self, run: Any, excuses: Any) -> Any:
            expected = np.ones((1, 50))
            actual = expected + self.error
            actual[0, 0] = self.kind
            return [({"logits": expected}, {"logits": actual})], []

    def make() -> Case:
        case = Draw("case", [], [], dict, noise=noise)
        case.number, (case.kind, case.error) = next(left)  # type: ignore[attr-defined]
        return case

    verifier = Verifier.__new__(Verifier)
    verifier.excuses = Excuses([Chooser()])
    case, *_ = verifier._settled(make, None, Choices())  # type: ignore[arg-type]
    return int(case.number)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "draws, noise, judged",
    [
        ([(1, 0.5), (0, 0.0)], NOISE, 1),
        ([(1, 0.5), (0, 0.5)], NOISE, 1),  # an error without a tie is one, and is judged
        ([(1, 0.005), (0, 0.0)], NOISE, 0),  # what the tie moved is within the bounds
        ([(0, 0.5), (0, 0.0)], NOISE, 0),
        ([(2, 0.5), (0, 0.0)], NOISE, 0),  # a wrong choice is judged
        ([(1, 0.5)] * 4 + [(1, 0.7), (0, 0.0)], NOISE, 4),  # there is an end
        ([(3, 0.005), (0, 0.0)], NOISE, 1),  # a tie that others may follow from
        ([(3, 0.005)] * 4 + [(3, 0.0), (0, 0.0)], NOISE, 4),
        ([(1, 0.0), (0, 0.0)], {}, 1),  # float32: any tie
        ([(3, 0.0), (0, 0.0)], {}, 0),  # where a tie is too small for others to follow
    ],
    ids=str,
)
def test_which_draw_is_judged(draws: list[tuple[int, float]], noise: dict[str, Noise], judged: int) -> None:
    assert drawn(draws, noise) == judged
