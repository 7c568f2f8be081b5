"""Errors of rows are what their definition says, whatever the block that they are computed in."""

import numpy as np
import pytest

from still_export.proof import cases
from still_export.proof.cases import are_zeros, errors_of

INF, NAN = np.inf, np.nan


def by_definition(expected: np.ndarray, actual: np.ndarray) -> tuple[np.ndarray, float]:
    """Row by row in float64; all numbers are finite."""
    rows, total = [], 0.0
    for a, b in zip(*(x.reshape(-1, x.shape[-1]).astype(np.float64) for x in (expected, actual)), strict=True):
        length = np.linalg.norm(a)
        held = a.any() or b.any()
        rows.append((np.abs(a - b).max(), abs(a @ (b - a)) / length if length else 0.0) if held else (NAN, NAN))
        total += np.abs(a - b).sum()
    return np.array(rows).T.reshape(2, *expected.shape[:-1]), total


@pytest.mark.parametrize("block", [1, 35, 1 << 16])
@pytest.mark.parametrize("types", [(np.float32, np.float32), (np.float32, np.float16), (np.float64, np.float32)])
@pytest.mark.parametrize("size", [1e-20, 1.0, 3e4, 1e30])
def test_errors_are_those_of_the_definition(
    block: int, types: tuple[type, type], size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if np.float16 in types and size not in (1.0, 3e4):
        pytest.skip("beyond the type")
    monkeypatch.setattr(cases, "BLOCK", block)  # 7 rows of 5 in a block, one, or all; in threads but for all
    random = np.random.default_rng(0)
    exact = np.clip(random.standard_normal((3, 4, 17, 5)), -2, 2) * size
    actual = (exact * (1 + 1e-3 * random.standard_normal(exact.shape))).astype(types[1])
    exact = exact.astype(types[0])
    exact[1, 2] = 0
    actual[1, 2, :9] = 0
    found, total = errors_of(exact, actual)
    rows, whole = by_definition(exact, actual)
    np.testing.assert_allclose(found[0], rows[0], rtol=1e-6)
    np.testing.assert_allclose(found[1], rows[1], rtol=1e-4, atol=1e-6 * np.nanmax(rows[0]))
    assert total == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize(
    ("expected", "actual", "largest"),
    [
        ([INF, 1, 2], [INF, 1, 2.5], 0.5),  # position 0 has an infinite score
        ([INF, 1, 2], [-INF, 1, 2], INF),
        ([1, 1, 2], [1, NAN, 2], INF),
        ([NAN, 1, 2], [NAN, 1, 2], INF),
        ([0, 0, 0], [0, NAN, 0], INF),
        ([3e38, 0, 0], [-3e38, 0, 0], 6e38),  # float32 has no such difference
        ([0, 0, 0], [0, 0, 1e-42], 1e-42),
        ([0, 0, 0], [0, 0, 0], NAN),
    ],
)
def test_rows_without_numbers(expected: list[float], actual: list[float], largest: float) -> None:
    found, _ = errors_of(*(np.array([[5, 6, 7], row], np.float32) for row in (expected, actual)))
    assert found[0, 0] == 0 and found[0, 1] == pytest.approx(largest, rel=1e-3, nan_ok=True)


def test_counts_are_rows_of_one() -> None:
    found, total = errors_of(np.array([3, 0, 7]), np.array([3, 0, 9]))
    np.testing.assert_array_equal(found[0], [0, NAN, 2])
    assert total == 2


def test_one_zero_is_as_many() -> None:
    dense = np.zeros((2, 3, 5), np.float32)
    one = np.broadcast_to(np.zeros((), np.float32), dense.shape)
    assert are_zeros(one) and not are_zeros(dense)
    assert not are_zeros(np.broadcast_to(np.float32(NAN), dense.shape)) and not are_zeros(dense[:0])
    for other in (one, dense, dense + 1, np.broadcast_to(np.float32(1), dense.shape)):
        for pair, same in (((one, other), (dense, other)), ((other, one), (other, dense))):
            (found, total), (rows, whole) = errors_of(*pair), errors_of(*same)
            np.testing.assert_array_equal(found, rows)
            assert total == whole
