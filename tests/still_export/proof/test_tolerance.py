"""The bounds of a float16 package: PyTorch's own run keeps them, a wrong row does not."""

from __future__ import annotations

import numpy as np

from still_export.mixers.ties import Excuses
from still_export.proof.cases import Case, noise_of, part_medians
from still_export.proof.tolerance import half_tolerance


def test_rows_that_err_together_are_allowed_and_wrong_rows_are_not() -> None:
    rng = np.random.default_rng(0)
    exact = rng.standard_normal((1, 300, 50))
    own = exact + 1e-3 * rng.standard_normal(exact.shape)
    own[0, 7] += 0.1  # one row of 300, all of whose numbers err alike
    case = Case("decode", [], [], lambda: {})
    case.noise["logits"] = noise_of([(exact, own)])
    bound = half_tolerance([case], Excuses()).absolute["logits"]
    assert case.noise["logits"].usual < 0.01
    assert max(part_medians(exact, own)) <= bound < 0.3
    wrong = own.copy()
    wrong[0, 3] = exact[0, 4]
    assert max(part_medians(exact, wrong)) > bound


def test_sums_of_constants_may_round_differently_and_may_not_lack_a_term() -> None:
    """Half precision's run of such a state is float32's own, to the bit: the normaliser of a layer whose features are all the floor."""
    term = np.float32(1e-12)
    chunk = np.cumsum(np.full(64, term))[-1]
    sums = np.full((1, 2, 3), np.cumsum(np.full(11, chunk))[-1])
    case = Case("decode", [], [], lambda: {}, noise={"z_state": noise_of([(sums, sums)])})
    bound = half_tolerance([case], Excuses()).absolute["z_state"]
    assert 0 < max(part_medians(sums, np.full_like(sums, 704 * np.float64(term)))) <= bound
    assert max(part_medians(sums, sums - term)) > 50 * bound
