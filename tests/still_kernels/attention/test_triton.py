"""The Triton kernels of still::Attention against the definition: in the interpreter here, compiled on a GPU."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from still_kernels.plan import Call
from still_kernels.registry import kernels_of
from tests.still_kernels.interpreted import run_cases
from tests.tolerances import REFERENCE

pytest.importorskip("triton")
triton_cases = pytest.importorskip("tests.still_kernels.attention.triton_cases")
SCRIPT = Path(__file__).with_name("triton_cases.py")
interpreted = functools.partial(run_cases, SCRIPT, kind="float32")
FAST = ("decode", "some tokens", "prefill")
"""Cases of the fast run: both kernels, every way into the cache."""


def check(errors: dict[str, float], dtype: torch.dtype) -> None:
    """The cache is copied, so exact; the output within tolerance."""
    assert errors["key"] == errors["value"] == 0.0
    assert errors["output"] <= REFERENCE[dtype]


@pytest.mark.parametrize("name", FAST)
def test_interpreter(name: str) -> None:
    check(interpreted(FAST)[name], torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("name", ("decode", "some tokens"))
def test_programs_may_run_in_any_order(name: str) -> None:
    check(interpreted(("decode", "some tokens"), kind="shuffled")[name], torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.long)]
)  # kernels do not tell them apart
@pytest.mark.parametrize("name", ("some tokens", "ragged splits"))
def test_interpreter_in_16_bits(name: str, dtype: str) -> None:
    check(interpreted(("some tokens", "ragged splits"), kind=dtype)[name], getattr(torch, dtype))


@pytest.mark.slow
def test_what_has_no_place() -> None:
    """A row that outgrows the state gets NaN for the tokens without a place; garbage writes nowhere."""
    interpreted((), kind="beyond")


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in triton_cases.CASES if n not in FAST])
def test_interpreter_rest(name: str) -> None:
    check(interpreted(tuple(n for n in triton_cases.CASES if n not in FAST))[name], torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", list(triton_cases.CASES))
def test_gpu(name: str, dtype: torch.dtype) -> None:
    check(triton_cases.run_case(name, "cuda", dtype), dtype)


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
