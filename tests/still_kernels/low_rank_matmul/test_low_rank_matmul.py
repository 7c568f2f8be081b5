"""The kernels of still::LowRankMatMul against float64: in Triton's interpreter, compiled on a GPU; and their machine code."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from still_graphs.errors import ShapeError
from still_kernels.low_rank_matmul.plan import naive_low_rank_matmul
from still_kernels.plan import Call
from still_kernels.registry import kernels_of
from tests.still_kernels.interpreted import run_cases

pytest.importorskip("triton")
cases = pytest.importorskip("tests.still_kernels.low_rank_matmul.cases")
from still_kernels.aot import compile_variant  # noqa: E402
from still_kernels.low_rank_matmul.plan import Variant  # noqa: E402
from tests.compiled import Before, inputs  # noqa: E402
from tests.machine_code import disassembly, lines  # noqa: E402

interpreted = functools.partial(run_cases, Path(__file__).with_name("cases.py"))
BOUND = 6e-4
"""Outputs are rounded to float16, 2.1e-4 by Frobenius norm; a number between that another order of sums rounds otherwise adds to it."""


@pytest.mark.slow
@pytest.mark.parametrize("name", list(cases.CASES))
def test_interpreter(name: str) -> None:
    assert interpreted()[name] <= BOUND


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(cases.CASES))
def test_gpu(name: str) -> None:
    assert cases.run_case(name, "cuda") <= BOUND


@pytest.mark.parametrize("name", list(cases.CASES))
def test_definition(name: str) -> None:
    for dtype, bound in ((torch.float32, 1e-6), (torch.float16, BOUND)):
        given = cases.call(cases.CASES[name], 2, 3, dtype)
        expected = cases.exact(given)
        assert (naive_low_rank_matmul(given).double() - expected).norm() <= bound * expected.norm()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inner": torch.zeros(71, 16).half()}, r"inner: expected \[72, 16\]"),
        ({"outer": torch.zeros(15, 104).half()}, r"outer: expected \[16, 104\]"),
        ({"base": torch.zeros(1, 1, 103).half()}, r"base: expected \[1, 1, 104\]"),
        ({"base": torch.zeros(1, 1, 104)}, "base: expected torch.float16, got torch.float32"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        naive_low_rank_matmul(replace(cases.call(cases.CASES["added"], 1, 1), **change))


def test_refusals() -> None:
    """What no kernel covers, with what is covered."""
    seen = Call({"B": 1, "T": 1, "I": 64, "R": 8, "O": 64}, {}, dtype="float32")
    (reason,) = kernels_of("LowRankMatMul").refusals(seen)
    assert "activations are float32" in reason


@pytest.mark.slow
@pytest.mark.parametrize("variant", [Variant(base=1), Variant(aligned=0)], ids=str)
def test_machine_code(variant: Variant, tmp_path: Path, compiled_before: Before) -> None:
    """Nothing spills, and no matrix instruction sums in half precision."""
    if compiled_before(inputs("LowRankMatMul", variant, 90)):
        return
    entry, cubins = compile_variant("LowRankMatMul", variant, 90)
    for name, kernel in entry["kernels"].items():
        found = {line.name for line in lines(disassembly(cubins[kernel["cubin"]], tmp_path))}
        assert not {"STL", "LDL"} & {part.split(".")[0] for part in found}, f"{name} spills"
        products = {part for part in found if "MMA" in part}
        assert products and all("F32" in part for part in products), products
