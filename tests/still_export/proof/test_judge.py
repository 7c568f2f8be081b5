"""The one bound: PyTorch's own run keeps it, a wrong row does not."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from still_export.proof.cases import Case, errors_of, row_errors
from still_export.proof.constants import TIMES
from still_export.proof.judge import Bounds, Judged, Report
from still_export.proof.verdict import WRONG, Check, Kind, Verdict
from still_kernels.ties import Choices

STATE, LOGITS = "present_key.0", "logits"


def case_of(exact: np.ndarray, own: np.ndarray, name: str) -> Case:
    rows, total = errors_of(exact, own)
    return Case("decode", [], [{name: exact}], own=[{name: rows}], own_mean={name: total / max(exact.size, 1)})


def judged(exact: np.ndarray, own: np.ndarray, actual: np.ndarray, name: str = LOGITS, *more: Case) -> Any:
    case = case_of(exact, own, name)
    judged = Judged(case, [{name: row_errors(exact, actual)}], [{}], {name: np.ones(2)}, np.ones(0), None)  # type: ignore[arg-type]
    return judged.report(name, Bounds([case, *more]))


def drawn(shape: tuple[int, ...], scale: float = 1e-3) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    exact = rng.standard_normal(shape)
    return exact, exact + scale * rng.standard_normal(shape), exact + scale * rng.standard_normal(shape)


def test_a_row_may_err_where_pytorchs_own_does() -> None:
    exact, own, actual = drawn((1, 300, 50), 1e-5)
    for run in (own, actual):
        run[0, 7] += 0.1  # one token of 300, all of whose logits err alike
    assert judged(exact, own, actual).passed
    actual[0, 8] += 0.5
    found = judged(exact, own, actual)
    assert not found.passed and found.worst_place == (0, 8) and 0.49 < found.worst < 0.7


def test_a_row_may_err_as_many_times_as_it_amplifies() -> None:
    """Of an own run that erred little by luck."""
    exact, own, actual = drawn((1, 300, 50), 1e-5)
    disturbed = exact + 1e-2 * np.random.default_rng(1).standard_normal(exact.shape)
    actual[0, 7] += 5e-3
    disturbed[0, 7] += 3.0
    case = case_of(exact, own, LOGITS)
    assert not judged(exact, own, actual).passed
    grown = case.amplifying(case_of(exact, disturbed, LOGITS))
    bounds = Bounds([grown])
    errors = row_errors(exact, actual)
    assert (errors <= bounds.rows(grown, 0, LOGITS)).all()
    errors[0, 0, 8] += 5e-3
    assert np.argwhere(errors > bounds.rows(grown, 0, LOGITS)).tolist() == [[0, 0, 8]]
    zeros = case.amplifying(case_of(exact, np.full_like(exact, np.inf), LOGITS))
    assert (zeros.amplified[0][LOGITS] == case.own[0][LOGITS]).all()


@pytest.mark.parametrize("scale", [1e-3, 1e-6])
def test_one_wrong_slot_of_one_head_is_found(scale: float) -> None:
    exact, own, actual = drawn((2, 3, 40, 8), scale)
    exact[:, :, 30:] = own[:, :, 30:] = actual[:, :, 30:] = 0  # empty slots say nothing
    assert judged(exact, own, actual, STATE).passed
    actual[1, 2, 5, 3] += 3 * TIMES * scale
    assert judged(exact, own, actual, STATE).worst_place == (1, 2, 5)
    actual[1, 2, 5] = exact[1, 2, 5]
    actual[0, 0, 35] = 3 * TIMES * scale  # nor may they be written
    assert not judged(exact, own, actual, STATE).passed


def test_a_factor_is_found_that_moves_no_number_far() -> None:
    exact, own, actual = drawn((1, 10, 4000))
    actual[0, 4] *= 1.01
    found = judged(exact, own, actual)
    assert not found.passed and found.worst_place == (0, 4)
    assert np.abs(actual - exact).max() < TIMES * np.abs(own - exact).max()


def test_what_is_no_number_fails() -> None:
    exact, own, actual = drawn((1, 3, 5))
    actual[0, 1, 1] = np.nan
    assert not judged(exact, own, actual).passed
    exact[0, 2, 2] = own[0, 2, 2] = np.inf
    actual[0, 1, 1], actual[0, 2, 2] = exact[0, 1, 1], np.inf
    assert judged(exact, own, actual).passed, "equal infinities do not differ"


def test_sums_of_constants_may_round_differently_and_may_not_lack_a_term() -> None:
    """The own run of such a state is the reference's, to the bit: the normaliser of a layer whose features are all the floor."""
    term = np.float32(1e-12)
    chunk = np.cumsum(np.full(64, term))[-1]
    sums = np.full((1, 2, 3), np.cumsum(np.full(11, chunk))[-1])
    assert judged(sums, sums, np.full_like(sums, 704 * np.float64(term)), "z_state").passed
    found = judged(sums, sums, sums - term, "z_state")
    assert not found.passed and found.worst > 50 * found.bound


@pytest.mark.parametrize("factor, passes", [(0.8, True), (1.3, False)])
def test_a_row_has_the_rounding_of_its_own_case(factor: float, passes: bool) -> None:
    """Sums of a long prompt err by more than those of twenty short ones."""
    exact, own, _ = drawn((1, 4, 60, 8), 1e-6)
    near = exact + (own - exact) / 100
    own[0, 0, 0] = near[0, 0, 0]  # by chance the row itself errs little
    usual = float(np.sqrt(np.square(row_errors(exact, own)).mean((1, 2, 3)))[0])
    actual = own.copy()
    actual[0, 0, 0] = exact[0, 0, 0]
    actual[0, 0, 0, 0] += factor * TIMES * usual
    assert judged(exact, own, actual, STATE, *[case_of(exact, near, STATE)] * 20).passed == passes


@pytest.mark.parametrize("codes, passes", [(1, True), (2, False)])
def test_a_code_may_be_the_neighbouring_one(codes: int, passes: bool) -> None:
    right = {STATE: np.array([[[[127.0, 3.0, -5.0]]]]), "present_key_scale.0": np.ones((1, 1, 1))}
    actual = {**right, STATE: right[STATE] + [0, codes, 0]}
    own = {name: row_errors(x, x) for name, x in right.items()}
    case = Case("case", [], [right], own=[own], own_mean=dict.fromkeys(right, 0.0))
    judged = Judged.of(case, [(right, actual)], scales={STATE: "present_key_scale.0"})
    assert judged.report(STATE, Bounds([case])).passed == passes


def test_an_overflow_of_pytorchs_own_run_allows_nothing() -> None:
    exact, own, actual = drawn((1, 1, 20, 8))
    own[0, 0, 3], actual[0, 0, 3] = np.inf, actual[0, 0, 3] + 1
    found = judged(exact, own, actual, STATE)
    assert not found.passed and found.worst_place == (0, 0, 3)


def test_reports_of_several_runs_are_one() -> None:
    exact, own, actual = drawn((1, 3, 5))
    first = Report(
        [judged(exact, own, actual)], 1.0, 1.0, Report.empty().selections, [Check("a", True)], None, "", ["x"]
    )
    second = Report(
        [judged(exact, own, actual + 1)], 0.5, 1.0, Report.empty().selections, [], 3, "polygraphy", ["x", "y"]
    )
    whole = (
        Report.empty().with_run("one", first).with_run("two", second).including(Verdict([Check("c", True)], ["y", "z"]))
    )
    assert not whole.passed and whole.nearest is not None and whole.nearest.run == "two"
    assert whole.not_asked == ["x", "y", "z"] and whole.top1 == 0.5 and whole.first_diverging_layer == 3
    assert [c.name for c in whole.checks] == ["one: a", "c"] and whole.command == "polygraphy"
    assert Report.empty().nearest is None and whole.to_dict()["nearest"]["share"] > 1


def test_a_verdict_names_the_kinds_of_what_failed() -> None:
    """A package that another version made fails by its files alone, and its numbers hold."""
    exact, own, actual = drawn((1, 3, 5))
    good, bad = (replace(Report.empty(), outputs=[judged(exact, own, actual + off)]) for off in (0, 1))
    other = {kind: Verdict([Check("c", False)]).of_kind(kind) for kind in Kind}

    def kinds(report: Report) -> set[Kind]:
        assert not report.passed and report.to_dict()["verdict"] == report.verdict
        found = {kind for kind, wrong in WRONG.items() if wrong in report.verdict}
        assert ("within its bound" in report.verdict) != bool(found & {Kind.NUMBERS, Kind.REFERENCE})
        return found

    assert good.passed and good.verdict == "PASSED"
    assert kinds(bad) == {Kind.NUMBERS}
    assert all(kinds(good.including(verdict)) == {kind} for kind, verdict in other.items())
    assert kinds(bad.including(other[Kind.FILES])) == {Kind.NUMBERS, Kind.FILES}
    assert kinds(good.including(other[Kind.FILES]).including(other[Kind.SETTINGS])) == {Kind.SETTINGS, Kind.FILES}
    wrong = replace(good, selections=Choices(1, 0, 1))
    assert kinds(wrong) == {Kind.NUMBERS}
