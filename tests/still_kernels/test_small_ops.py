"""Kernels of small ops without a state against float64: in Triton's interpreter, compiled on a GPU; and their machine code."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from still_graphs.errors import ShapeError, UnsupportedError
from still_kernels.plan import Call
from still_kernels.registry import kernels_of
from tests.still_kernels.interpreted import run_cases

pytest.importorskip("triton")
from still_kernels.aot import compile_variant
from tests.compiled import Before, inputs
from tests.machine_code import disassembly, lines

NAMES = {
    "add_rms_norm": "AddRmsNorm",
    "low_rank_matmul": "LowRankMatMul",
    "rotary_qkv": "RotaryQkv",
    "swi_glu": "SwiGlu",
}
CASES = {op: import_module(f"tests.still_kernels.{op}.cases") for op in NAMES}
PLANS = {op: import_module(f"still_kernels.{op}.plan") for op in NAMES}
BOUNDS = dict.fromkeys(NAMES, 4e-4) | {"low_rank_matmul": 6e-4}
"""Outputs are rounded to float16: 2.1e-4 by Frobenius norm. A number between two products that another order of sums rounds otherwise adds
to it."""
FIRST = {op: next(iter(cases.CASES)) for op, cases in CASES.items()} | {"rotary_qkv": "gate"}
every_case = pytest.mark.parametrize("op, name", [(op, name) for op, cases in CASES.items() for name in cases.CASES])


def defined(op: str, given: Any) -> tuple[torch.Tensor, ...]:
    """Outputs of the op's definition."""
    found = getattr(PLANS[op], f"naive_{op}")(given)
    return (found,) if isinstance(found, torch.Tensor) else found


@pytest.mark.slow
@every_case
def test_interpreter(op: str, name: str) -> None:
    assert run_cases(Path(str(CASES[op].__file__)))[name] <= BOUNDS[op]


@pytest.mark.gpu
@every_case
def test_gpu(op: str, name: str) -> None:
    assert CASES[op].run_case(name, "cuda") <= BOUNDS[op]


@every_case
def test_definition(op: str, name: str) -> None:
    """In float32 and in float16, which is rounded where an output, or a number between two products, is stored."""
    for dtype, bound in ((torch.float32, 1e-6), (torch.float16, BOUNDS[op])):
        given = CASES[op].call(CASES[op].CASES[name], 2, 3, dtype)
        exact = CASES[op].exact(given)
        for result, expected in zip(
            defined(op, given), (exact,) if isinstance(exact, torch.Tensor) else exact, strict=True
        ):
            assert (result.double() - expected).norm() <= bound * expected.norm()


@pytest.mark.parametrize(
    ("op", "change", "message"),
    [
        ("add_rms_norm", {"residual": torch.zeros(1, 1, 57).half()}, r"residual: expected \[1, 1, 56\]"),
        ("add_rms_norm", {"residual": torch.zeros(1, 1, 56)}, "residual: expected torch.float16, got torch.float32"),
        ("add_rms_norm", {"norm_weight": torch.zeros(55).half()}, r"norm_weight: expected \[56\]"),
        ("low_rank_matmul", {"inner": torch.zeros(71, 16).half()}, r"inner: expected \[72, 16\]"),
        ("low_rank_matmul", {"outer": torch.zeros(15, 104).half()}, r"outer: expected \[16, 104\]"),
        ("low_rank_matmul", {"base": torch.zeros(1, 1, 103).half()}, r"base: expected \[1, 1, 104\]"),
        ("low_rank_matmul", {"base": torch.zeros(1, 1, 104)}, "base: expected torch.float16, got torch.float32"),
        ("rotary_qkv", {"input": torch.zeros(1, 1, 335).half()}, "are not the input's 335 together"),
        ("rotary_qkv", {"cos": torch.zeros(1, 1, 16)}, "cos: expected torch.float16, got torch.float32"),
        ("rotary_qkv", {"sin": torch.zeros(1, 1, 8).half()}, r"sin: expected \[1, 1, 16\]"),
        ("rotary_qkv", {"gate_bias": torch.zeros(9).half()}, r"gate_bias: expected \[104\]"),
        (
            "rotary_qkv",
            {"query_width": 136, "value_width": 48},
            "query_width=136, key_width=48 are no heads of an even D=16",
        ),
        (
            "rotary_qkv",
            {"value_width": 0, "gate_width": 144, "gate_bias": None},
            "query, key and value must have numbers",
        ),
        ("swi_glu", {"input": torch.zeros(1, 1, 113).half()}, r"input: expected \[1, 1, 112\], got \[1, 1, 113\]"),
        ("swi_glu", {"width": 55}, r"input: expected \[1, 1, 110\]"),
        ("swi_glu", {"input": torch.zeros(1, 112).half()}, r"input: expected \[B, T, 2\*width\]"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_named(op: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        defined(op, replace(CASES[op].call(CASES[op].CASES[FIRST[op]], 1, 1), **change))


SIZES = {"B": 1, "T": 1, "F": 64, "D": 16}
WIDTHS = {"query_width": 32, "key_width": 16, "value_width": 16, "gate_width": 0}


@pytest.mark.parametrize(
    ("name", "sizes", "attributes", "present", "message"),
    [
        ("SwiGlu", {"B": 1, "T": 1}, {"width": 0}, (), "width=0: expected numbers"),
        ("RotaryQkv", SIZES, WIDTHS | {"value_width": 8}, (), "32, 16, 8 and 0 are not the input's 64"),
        ("RotaryQkv", SIZES, WIDTHS | {"query_width": 24, "key_width": 24}, (), "are no heads of an even D=16"),
        ("RotaryQkv", SIZES, WIDTHS | {"value_width": 0, "gate_width": 16}, (), "must have numbers"),
        ("RotaryQkv", SIZES, WIDTHS, ("gate_bias",), "a gate_bias or gate_input a gate"),
    ],
    ids=str,
)
def test_calls_that_make_no_sense(
    name: str, sizes: dict[str, int], attributes: dict[str, int], present: tuple[str, ...], message: str
) -> None:
    call = Call(sizes | attributes, attributes, dtype="float16", present=frozenset(present))
    with pytest.raises(UnsupportedError, match=message):
        kernels_of(name).plan.check(call)


@pytest.mark.parametrize(
    ("name", "sizes", "attributes", "what"),
    [
        ("AddRmsNorm", {"B": 1, "T": 1, "I": 64}, {"norm_epsilon": 1e-5}, "sums with their norms"),
        ("LowRankMatMul", {"B": 1, "T": 1, "I": 64, "R": 8, "O": 64}, {}, ""),
        ("RotaryQkv", SIZES | WIDTHS, WIDTHS, "the rotation"),
        ("SwiGlu", {"B": 1, "T": 1, "width": 64}, {"width": 64}, "gates"),
    ],
)
def test_refusals(name: str, sizes: dict[str, int], attributes: dict[str, Any], what: str) -> None:
    """What no kernel covers, with what is covered."""
    (reason,) = kernels_of(name).refusals(Call(sizes, attributes, dtype="float32"))
    assert (
        reason.startswith("activations are float32; ")
        and reason.endswith("kernels for float16, bfloat16.")
        and what in reason
    )


@pytest.mark.parametrize("op", NAMES)
def test_unknown_device_is_refused(op: str) -> None:
    with pytest.raises(UnsupportedError, match="device 'cpu'"):
        PLANS[op].OP.run(CASES[op].call(CASES[op].CASES[FIRST[op]], 1, 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "fields"),
    [
        *(("add_rms_norm", fields) for fields in ({}, {"wide": 1}, {"aligned": 0})),
        *(("low_rank_matmul", fields) for fields in ({"base": 1}, {"aligned": 0})),
        *(("rotary_qkv", fields) for fields in ({"gated": 1, "biased": 1}, {"aligned": 0})),
        *(("swi_glu", fields) for fields in ({}, {"aligned": 0})),
    ],
    ids=str,
)
def test_machine_code(op: str, fields: dict[str, int], tmp_path: Path, compiled_before: Before) -> None:
    """Nothing spills, and no matrix instruction sums in half precision."""
    variant = PLANS[op].Variant(**fields)
    if compiled_before(inputs(NAMES[op], variant, 90)):
        return
    entry, cubins = compile_variant(NAMES[op], variant, 90)
    for name, kernel in entry["kernels"].items():
        found = {line.name for line in lines(disassembly(cubins[kernel["cubin"]], tmp_path))}
        assert not {"STL", "LDL"} & {part.split(".")[0] for part in found}, f"{name} spills"
        products = {part for part in found if part.startswith(("HMMA", "HGMMA"))}
        assert bool(products) == (op == "low_rank_matmul") and all("F32" in part for part in products), products
