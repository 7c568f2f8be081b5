"""The bounds of a package: PyTorch's own run keeps them, a wrong row does not."""

import math
from typing import Any

import numpy as np
import pytest

from still_export.proof.cases import Case, row_errors
from still_export.proof.judge import CHANCE, Bounds, _above

STATE, LOGITS = "present_key.0", "logits"


def case_of(exact: np.ndarray, own: np.ndarray, name: str) -> Case:
    return Case("decode", [], [{name: exact}], own=[{name: row_errors(exact, own)}])


def judged(exact: np.ndarray, own: np.ndarray, actual: np.ndarray, name: str = LOGITS) -> Any:
    case = case_of(exact, own, name)
    return Bounds([case]).judge(case, name, [row_errors(exact, actual)])


def drawn(shape: tuple[int, ...], scale: float = 1e-3) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    exact = rng.standard_normal(shape)
    return exact, exact + scale * rng.standard_normal(shape), exact + scale * rng.standard_normal(shape)


def test_a_row_may_err_where_pytorchs_own_does() -> None:
    exact, own, actual = drawn((1, 300, 50))
    for run in (own, actual):
        run[0, 7] += 0.1  # one token of 300, all of whose logits err alike
    assert judged(exact, own, actual).share <= 1
    actual[0, 8] += 0.3
    found = judged(exact, own, actual)
    assert found.share > 1 and found.place == (0, 8) and 0.29 < found.worst < 0.4


@pytest.mark.parametrize("scale", [1e-3, 1e-6])
def test_one_wrong_slot_of_one_head_is_found(scale: float) -> None:
    exact, own, actual = drawn((2, 3, 40, 8), scale)
    exact[:, :, 30:] = own[:, :, 30:] = actual[:, :, 30:] = 0  # empty slots say nothing
    assert judged(exact, own, actual, STATE).share <= 1
    actual[1, 2, 5, 3] += 40 * scale
    assert judged(exact, own, actual, STATE).place == (1, 2, 5)
    actual[1, 2, 5] = exact[1, 2, 5]
    actual[0, 0, 35] = 1e-3 + 40 * scale  # nor may they be written
    assert judged(exact, own, actual, STATE).share > 1


def test_a_head_whose_numbers_are_all_a_little_off_is_found_by_its_median() -> None:
    exact, own, actual = (1 + side - drawn((2, 3, 40, 8))[0] for side in drawn((2, 3, 40, 8)))
    actual[:, 1] = 1 + 1.7e-2 * (-1.0) ** np.arange(8)  # less than a row may err, and no factor
    found = judged(exact, own, actual, STATE)
    assert found.share > 1 and found.median and found.place == (1,)


def test_a_factor_is_found_that_moves_no_number_far() -> None:
    exact, own, actual = drawn((1, 10, 4000))
    actual[0, 4] *= 1.001
    found = judged(exact, own, actual)
    assert found.share > 1 and found.place == (0, 4)
    assert np.abs(actual - exact).max() < 8 * np.abs(own - exact).max()


def test_what_is_no_number_fails() -> None:
    exact, own, actual = drawn((1, 3, 5))
    actual[0, 1, 1] = np.nan
    assert judged(exact, own, actual).share > 1
    exact[0, 2, 2] = own[0, 2, 2] = np.inf
    actual[0, 1, 1], actual[0, 2, 2] = exact[0, 1, 1], np.inf
    assert judged(exact, own, actual).share <= 1, "equal infinities do not differ"


def test_sums_of_constants_may_round_differently_and_may_not_lack_a_term() -> None:
    """The own run of such a state is the reference's, to the bit: the normaliser of a layer whose features are all the floor."""
    term = np.float32(1e-12)
    chunk = np.cumsum(np.full(64, term))[-1]
    sums = np.full((1, 2, 3), np.cumsum(np.full(11, chunk))[-1])
    assert judged(sums, sums, np.full_like(sums, 704 * np.float64(term)), "z_state").share <= 1
    found = judged(sums, sums, sums - term, "z_state")
    assert found.share > 1 and found.worst > 50 * found.bound


@pytest.mark.parametrize("dtype, times", [("float32", 48), ("float16", 12)])
def test_a_row_has_the_bound_of_its_type(dtype: str, times: int) -> None:
    """Behind a token of huge activations a row of a trained float32 model errs 17 times as far as PyTorch's."""
    exact, own, _ = drawn((1, 300, 50))
    case = case_of(exact, own, LOGITS)
    usual = float(Bounds([case], dtype=dtype).usual[LOGITS][0])
    for factor, passes in ((0.8, True), (1.6, False)):
        actual = own.copy()
        actual[0, 7, 3] = exact[0, 7, 3] + factor * times * usual
        assert (Bounds([case], dtype=dtype).judge(case, LOGITS, [row_errors(exact, actual)]).share <= 1) == passes


@pytest.mark.parametrize("name, dtype", [(STATE, "float32"), (LOGITS, "float32"), (STATE, "float16")])
def test_a_float32_states_row_has_the_rounding_of_its_own_case(name: str, dtype: str) -> None:
    """Sums of a long prompt err by more than those of twenty short ones; twice as far as that is found."""
    exact, own, _ = drawn((1, 4, 60, 8), 1e-6)
    near = exact + (own - exact) / 100
    if name == LOGITS:
        exact, own, near = (side[0] for side in (exact, own, near))
    first = (0,) * (exact.ndim - 1)
    own[first] = near[first]  # by chance the row itself errs little
    cases = [case_of(exact, own, name), *[case_of(exact, near, name)] * 20]
    errors = row_errors(exact, own)
    usual = float(np.sqrt(np.square(errors).mean((1, 2, 3) if errors.ndim == 4 else (1, 2)))[0])
    bounds, row = Bounds(cases, dtype=dtype), own.copy()
    row[first] = exact[first]
    for factor, passes in ((0.8, True), (2.0, False)):
        actual = row.copy()
        actual[(*first, 0)] += factor * 48 * usual
        held = bounds.judge(cases[0], name, [row_errors(exact, actual)]).share <= 1
        assert held == (passes and name == STATE and dtype == "float32"), (factor, held)


@pytest.mark.parametrize("name, times", [(STATE, 8), (LOGITS, 0)])
def test_a_row_of_a_state_may_err_eight_times_as_far_as_the_furthest_of_pytorchs(name: str, times: int) -> None:
    """Rows that a near tie turned are others in each run."""
    exact, own, actual = drawn((1, 1, 400, 8), 1e-3)
    if name == LOGITS:
        exact, own, actual = (side[0] for side in (exact, own, actual))
    own[..., 7, :] += 0.1
    actual[..., 200, :] += 0.5
    assert (judged(exact, own, actual, name).share <= 1) == bool(times)
    actual[..., 200, :] += 0.5
    assert judged(exact, own, actual, name).share > 1


@pytest.mark.parametrize(
    "dtype, coarse, found", [("float16", 1.0, True), ("float16", 1.5, False), ("float32", 1.0, False)]
)
def test_half_precision_logits_on_a_cpu_err_as_pytorchs_do(dtype: str, coarse: float, found: bool) -> None:
    exact, own, _ = drawn((1, 300, 50))
    case = case_of(exact, own, LOGITS)
    verdict = Bounds([case], coarse, dtype).judge(case, LOGITS, [row_errors(exact, exact + 3 * (own - exact))])
    assert (verdict.share > 1) == found and verdict.median


def test_a_median_of_few_draws_may_err_as_few_of_pytorchs_do() -> None:
    """A token of huge activations errs in all heads of a sequence alike, which are one draw."""
    exact, own, actual = drawn((33, 9, 8))
    own[::10] += 0.02
    pool, few = case_of(exact, own, STATE), case_of(exact[1:2], own[1:2], STATE)
    bounds = Bounds([pool, few])
    assert bounds.judge(few, STATE, [row_errors(exact[1:2], actual[1:2] + 0.1)]).share <= 1
    found = bounds.judge(pool, STATE, [row_errors(exact, actual + 0.1)])
    assert found.share > 1 and found.median


@pytest.mark.parametrize("count", [1, 2, 9, 64, 1001])
def test_the_median_of_draws_lies_above_by_chance_hardly_ever(count: int) -> None:
    above = 1 - float(_above(np.array(count)))
    tail = sum(math.comb(count, k) * above**k * (1 - above) ** (count - k) for k in range((count + 1) // 2, count + 1))
    assert tail <= CHANCE
    assert count < 9 or tail > 1e-3 * CHANCE


def test_features_that_a_kernel_rounds_are_no_fault_of_their_sum() -> None:
    """PyTorch's own run sums features that are 1 together in float32, so its sum errs across itself alone."""
    rng = np.random.default_rng(0)
    features = rng.dirichlet(np.ones(128), (2, 512)).astype(np.float64)  # [heads, tokens, F]
    other = features * (1 + 2e-3 * rng.standard_normal(features.shape))
    exact, own = (x.sum(1)[None] for x in (features, other / other.sum(-1, keepdims=True)))
    rounded = features.astype(np.float16).astype(np.float64) * (1 + 5e-4 * rng.standard_normal((2, 512, 1)))
    name = "present_z_state.0"
    assert judged(exact, own, rounded.sum(1)[None], name).share <= 1
    assert judged(exact, own, 1.005 * exact, name).share > 1


@pytest.mark.parametrize(("off", "passes"), [(2.0, True), (8.0, False)])
def test_one_tokens_logits_by_layer_may_err_along_them(off: float, passes: bool) -> None:
    """PyTorch's own error along a row is chance, what the row errs is not."""
    exact, own, actual = drawn((1, 1, 64))
    row = exact[0, 0] / np.linalg.norm(exact[0, 0])
    own[0, 0] -= row * ((own - exact)[0, 0] @ row)
    actual[0, 0] = exact[0, 0] + row * off * np.abs(own - exact).max()
    case = case_of(exact, own, LOGITS)
    assert (Bounds([case], sharp=True).judge(case, LOGITS, [row_errors(exact, actual)]).share <= 1) == passes


@pytest.mark.parametrize(("times", "passes"), [(1.6, True), (2.4, False)])
def test_heads_of_a_fixed_state_are_its_draws(times: float, passes: bool) -> None:
    """All rows of six heads err alike, so their mean is one of six draws and not of 240; a state that grows has as many as rows."""
    exact, own, _ = drawn((1, 6, 40, 16))
    name, off = "present_recurrent_state.0", float(np.abs(own - exact).mean())
    case = case_of(exact, own, name)
    case.own_mean = {name: off}
    held = times * off
    assert (held <= Bounds([case], sharp=True, fixed={name}).mean(case, name)) == passes
    assert held > Bounds([case], sharp=True).mean(case, name)
