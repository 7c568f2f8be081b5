"""The kernel of still::RotaryQkv against float64: in Triton's interpreter, compiled on a GPU; and its machine code."""

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
from still_kernels.rotary_qkv.plan import naive_rotary_qkv
from tests.rotary_qkv_cases import CASES, call, exact
from tests.still_kernels.interpreted import run_cases

pytest.importorskip("triton")
cases = pytest.importorskip("tests.still_kernels.rotary_qkv.cases")
from still_kernels.aot import compile_variant  # noqa: E402
from still_kernels.rotary_qkv.plan import Variant  # noqa: E402
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
        for result, expected in zip(naive_rotary_qkv(given), exact(given), strict=True):
            assert (result.double() - expected).norm() <= bound * expected.norm()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input": torch.zeros(1, 1, 335).half()}, "are not the input's 335 together"),
        ({"cos": torch.zeros(1, 1, 16)}, "cos: expected torch.float16, got torch.float32"),
        ({"sin": torch.zeros(1, 1, 8).half()}, r"sin: expected \[1, 1, 16\]"),
        ({"gate_bias": torch.zeros(9).half()}, r"gate_bias: expected \[104\]"),
        ({"query_width": 136, "value_width": 48}, "query_width=136, key_width=48 are no heads of an even D=16"),
        ({"value_width": 0, "gate_width": 144, "gate_bias": None}, "query, key and value must have numbers"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        naive_rotary_qkv(replace(call(CASES["gate"], 1, 1), **change))


SIZES = {"B": 1, "T": 1, "F": 64, "D": 16}
WIDTHS = {"query_width": 32, "key_width": 16, "value_width": 16, "gate_width": 0}


@pytest.mark.parametrize(
    ("widths", "present", "message"),
    [
        ({"value_width": 8}, (), "32, 16, 8 and 0 are not the input's 64"),
        ({"query_width": 24, "key_width": 24}, (), "are no heads of an even D=16"),
        ({"value_width": 0, "gate_width": 16}, (), "must have numbers"),
        ({}, ("gate_bias",), "a gate_bias or gate_input a gate"),
    ],
    ids=str,
)
def test_calls_that_make_no_sense(widths: dict[str, int], present: tuple[str, ...], message: str) -> None:
    given = WIDTHS | widths
    seen = Call(SIZES | given, given, dtype="float16", present=frozenset(present))
    with pytest.raises(UnsupportedError, match=message):
        kernels_of("RotaryQkv").plan.check(seen)


def test_refusals() -> None:
    """What no kernel covers, with what is covered."""
    seen = Call(SIZES | WIDTHS, WIDTHS, dtype="float32")
    assert kernels_of("RotaryQkv").refusals(seen) == [
        "activations are float32; the rotation has kernels for float16, bfloat16."
    ]


def test_unknown_device_is_refused() -> None:
    from still_kernels.rotary_qkv.plan import OP

    with pytest.raises(UnsupportedError, match="device 'cpu'"):
        OP.run(call(CASES["gate"], 1, 1))


@pytest.mark.slow
@pytest.mark.parametrize("variant", [Variant(gated=1, biased=1), Variant(aligned=0)], ids=str)
def test_machine_code(variant: Variant, tmp_path: Path, compiled_before: Before) -> None:
    """Nothing spills."""
    if compiled_before(inputs("RotaryQkv", variant, 90)):
        return
    entry, cubins = compile_variant("RotaryQkv", variant, 90)
    for name, kernel in entry["kernels"].items():
        found = {line.name.split(".")[0] for line in lines(disassembly(cubins[kernel["cubin"]], tmp_path))}
        assert not {"STL", "LDL"} & found, f"{name} spills"
