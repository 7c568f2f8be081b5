"""The kernels of still::MatMulNBits against products in float64: in interpreters here, compiled on a GPU; and their machine code."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from still_graphs.errors import ShapeError, UnsupportedError
from still_kernels.matmul_nbits.plan import naive_matmul_nbits
from still_kernels.plan import Call
from still_kernels.registry import kernels_of
from tests.matmul_nbits_cases import FEW, exact, tokens, weight
from tests.still_kernels.interpreted import run_cases

pytest.importorskip("triton")
cases = pytest.importorskip("tests.still_kernels.matmul_nbits.cases")
FAST = ("few: 4 bits", "few: 8 bits", "many: 4 bits, no zero points")
interpreted = functools.partial(run_cases, Path(__file__).with_name("cases.py"))
BOUND = 4e-4
"""Outputs are rounded to float16: 2.1e-4 by Frobenius norm. Sums are in float32, the weight is exact."""


@pytest.mark.slow
@pytest.mark.parametrize("name", FAST)
def test_interpreter(name: str) -> None:
    assert interpreted(FAST)[name] <= BOUND


@pytest.mark.long
@pytest.mark.parametrize("name", list(cases.CASES))
def test_interpreter_rest(name: str) -> None:
    assert interpreted(tuple(cases.CASES))[name] <= BOUND


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(cases.CASES))
def test_gpu(name: str) -> None:
    assert cases.run_case(name, "cuda") <= BOUND


@pytest.mark.parametrize("name", list(FEW))
def test_definition(name: str) -> None:
    """In float32 and in float16, which is rounded once."""
    for dtype, bound in ((torch.float32, 1e-6), (torch.float16, BOUND)):
        given = replace(weight(FEW[name], dtype), input=tokens(FEW[name], 2, 3, dtype))
        expected = exact(given)
        assert (naive_matmul_nbits(given).double() - expected).norm() <= bound * expected.norm()


def test_definition_of_one_weight() -> None:
    """By hand: the first code of a word is the lowest, the middle is 0, and zero points fill whole words."""
    given = weight(replace(FEW["one block"], outputs=1))
    blocks, scales = torch.zeros(1, 4, dtype=torch.int32), torch.full((1, 1), 0.5).half()
    blocks[0, 0], blocks[0, 3] = 0x0000001F, -0x10000000
    x = torch.zeros(1, 1, 32).half()
    x[0, 0, 0], x[0, 0, 1], x[0, 0, 31] = 1, 10, 100
    alone = replace(given, input=x, blocks=blocks, scales=scales, zero_points=None)
    assert naive_matmul_nbits(alone).item() == 0.5 * (7 - 70 + 700)
    moved = replace(alone, zero_points=torch.tensor([[3]], dtype=torch.int32))
    assert naive_matmul_nbits(moved).item() == 0.5 * (12 - 20 + 1200)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"bits": 3}, "bits=3"),
        ({"block_size": 256}, "block_size=256 does not divide I=32"),
        ({"blocks": torch.zeros(3, 5, dtype=torch.int32)}, "blocks have 5 words for I=32 inputs of 4 bits"),
        ({"scales": torch.zeros(3, 1)}, "scales: expected torch.float16, got torch.float32"),
        ({"zero_points": torch.zeros(3, 2, dtype=torch.int32)}, "zero_points have 2 words for 1 blocks of 4 bits"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_named(change: dict[str, torch.Tensor], message: str) -> None:
    given = replace(weight(FEW["one block"]), input=tokens(FEW["one block"], 1, 1), **change)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match=message):
        naive_matmul_nbits(given)


SIZES = {"B": 1, "T": 1, "I": 64, "O": 8, "IW": 8, "IS": 2}


@pytest.mark.parametrize(
    ("attributes", "dtype", "message"),
    [({}, "bfloat16", "have kernels for float16"), ({"block_size": 16}, "float16", "the kernels have multiples of 32")],
    ids=str,
)
def test_refusals(attributes: dict[str, int], dtype: str, message: str) -> None:
    """What no kernel covers, with what is covered."""
    call = Call(SIZES, {"bits": 4, "block_size": 32, **attributes}, dtype=dtype)
    assert [r for r in kernels_of("MatMulNBits").refusals(call) if message in r]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"IW": 9}, "blocks have 9 words for I=64"),
        ({"IS": 3}, "scales are 3 for I=64"),
        ({"IZ": 2}, "zero_points have 2 words for 2 blocks"),
    ],
    ids=str,
)
def test_calls_that_make_no_sense(sizes: dict[str, int], message: str) -> None:
    present = frozenset({"zero_points"} if "IZ" in sizes else ())
    call = Call(
        {**SIZES, **sizes},
        {"bits": 4, "block_size": 32, "zero_code": -1, "super_block": 0},
        dtype="float16",
        present=present,
    )
    with pytest.raises(UnsupportedError, match=message):
        kernels_of("MatMulNBits").plan.check(call)


def test_unknown_device_is_refused() -> None:
    from still_kernels.matmul_nbits.plan import OP

    with pytest.raises(UnsupportedError, match="device 'cpu'"):
        OP.run(replace(weight(FEW["4 bits"]), input=tokens(FEW["4 bits"], 1, 1)))
