"""The kernel of still::SwiGlu against float64: in Triton's interpreter, compiled on a GPU; and its machine code."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from still_graphs.errors import ShapeError, UnsupportedError
from still_kernels.plan import Call
from still_kernels.registry import kernels_of
from still_kernels.swi_glu.plan import naive_swi_glu
from tests.still_kernels.interpreted import run_cases
from tests.swi_glu_cases import CASES, call, exact

pytest.importorskip("triton")
cases = pytest.importorskip("tests.still_kernels.swi_glu.cases")
from still_kernels.aot import compile_variant  # noqa: E402
from still_kernels.swi_glu.plan import Variant  # noqa: E402
from tests.compiled import Before, inputs  # noqa: E402
from tests.machine_code import disassembly, lines  # noqa: E402

interpreted = functools.partial(run_cases, Path(__file__).with_name("cases.py"))
BOUND = 4e-4
"""Outputs are rounded to float16: 2.1e-4 by Frobenius norm."""


@pytest.mark.slow
@pytest.mark.parametrize("name", list(CASES))
def test_interpreter(name: str) -> None:
    assert interpreted()[name] <= BOUND


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(CASES))
def test_gpu(name: str) -> None:
    assert cases.run_case(name, "cuda") <= BOUND


@pytest.mark.parametrize("name", list(CASES))
def test_definition(name: str) -> None:
    """In float32 and in float16, which is rounded once."""
    for dtype, bound in ((torch.float32, 1e-6), (torch.float16, BOUND)):
        given = call(CASES[name], 2, 3, dtype)
        expected = exact(given)
        assert (naive_swi_glu(given).double() - expected).norm() <= bound * expected.norm()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input": torch.zeros(1, 1, 113).half()}, r"input: expected \[1, 1, 112\], got \[1, 1, 113\]"),
        ({"width": 55}, r"input: expected \[1, 1, 110\]"),
        ({"input": torch.zeros(1, 112).half()}, r"input: expected \[B, T, 2\*width\]"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        naive_swi_glu(replace(call(CASES["one block"], 1, 1), **change))


def test_calls_that_make_no_sense() -> None:
    with pytest.raises(UnsupportedError, match="width=0: expected numbers"):
        kernels_of("SwiGlu").plan.check(Call({"B": 1, "T": 1, "width": 0}, {"width": 0}, dtype="float16"))


def test_refusals() -> None:
    """What no kernel covers, with what is covered."""
    seen = Call({"B": 1, "T": 1, "width": 64}, {"width": 64}, dtype="float32")
    assert kernels_of("SwiGlu").refusals(seen) == ["activations are float32; gates have kernels for float16, bfloat16."]


def test_unknown_device_is_refused() -> None:
    from still_kernels.swi_glu.plan import OP

    with pytest.raises(UnsupportedError, match="device 'cpu'"):
        OP.run(call(CASES["one block"], 1, 1))


@pytest.mark.slow
@pytest.mark.parametrize("variant", [Variant(), Variant(aligned=0)], ids=str)
def test_machine_code(variant: Variant, tmp_path: Path, compiled_before: Before) -> None:
    """Nothing spills."""
    if compiled_before(inputs("SwiGlu", variant, 90)):
        return
    entry, cubins = compile_variant("SwiGlu", variant, 90)
    for name, kernel in entry["kernels"].items():
        found = {line.name.split(".")[0] for line in lines(disassembly(cubins[kernel["cubin"]], tmp_path))}
        assert not {"STL", "LDL"} & found, f"{name} spills"
