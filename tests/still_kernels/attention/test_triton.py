"""The Triton kernels of still::Attention beside the cases of test_triton.py: splits, and what has no place."""

from __future__ import annotations

import pytest

from still_kernels.plan import Call
from still_kernels.registry import kernels_of

pytest.importorskip("triton")
triton_cases = pytest.importorskip("tests.still_kernels.attention.triton_cases")


@pytest.mark.gpu
def test_gpu_what_has_no_place() -> None:
    triton_cases.run_beyond("cuda")


def test_splits_follow_the_capacity_of_one_row() -> None:
    """Few heads: the chip is filled; many: no more programs than that; never more than are merged together."""
    op = kernels_of("Attention")
    build = op.build(op.variant(), 90)

    def splits(batch: int, rows: int) -> int:
        sizes = {"B": batch, "T": 1, "H": 32, "HK": 8, "D": 128, "N": rows}
        return op.plan.evaluate(Call(sizes, {}, build.plan_constants, dtype="bfloat16")).steps[0].grid[0]

    assert [splits(1, 65536), splits(8, 65536), splits(64, 65536), splits(1, 200), splits(1, 0)] == [33, 5, 1, 2, 1]
