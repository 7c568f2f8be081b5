"""Kernels of ops without a state against float64: in Triton's interpreter, compiled on a GPU; their definitions; and their machine code."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from still_graphs.errors import ShapeError
from still_kernels.gated_mlp.plan import naive_gated_mlp
from still_kernels.matmul_nbits.plan import naive_matmul_nbits
from still_kernels.registry import kernels_of
from tests.still_kernels.dense_matmul.inputs import FEW as FEW_DENSE
from tests.still_kernels.dense_matmul.inputs import FLOAT8
from tests.still_kernels.interpreted import run_cases
from tests.still_kernels.matmul_nbits.inputs import FEW, tokens, weight

pytest.importorskip("triton")
from still_kernels.aot import compile_variant
from tests.machine_code import Line, disassembly, lines

BOUNDS = {
    **dict.fromkeys(("add_rms_norm", "dense_matmul", "gated_mlp", "matmul_nbits", "rotary_qkv", "swi_glu"), 4e-4),
    **dict.fromkeys(("low_rank_matmul", "experts"), 6e-4),
    **dict.fromkeys(("greedy_token", "round_key_value"), 0.0),
}
"""Outputs are rounded to float16: 2.1e-4 by Frobenius norm. A number between two products that another order of sums rounds otherwise adds
to it. Sums in half precision are off by more."""
CASES = {op: import_module(f"tests.still_kernels.{op}.cases") for op in BOUNDS}
PLANS = {op: import_module(f"still_kernels.{op}.plan") for op in BOUNDS}
FAST = ("few: 4 bits", "few: 8 bits", "many: 4 bits, no zero points")
"""Cases of still::MatMulNBits that do not take long."""
FIRST = {op: next(iter(cases.CASES)) for op, cases in CASES.items()} | {
    "rotary_qkv": "gate",
    "matmul_nbits": "one block",
}
DEFINED = {op: list(cases.CASES) for op, cases in CASES.items() if op != "experts"}
DEFINED |= {"dense_matmul": [*FEW_DENSE, *FLOAT8], "gated_mlp": ["few"], "matmul_nbits": list(FEW)}
EVERY = [(op, name) for op, cases in CASES.items() for name in cases.CASES]
EVERY.append(("dense_matmul", CASES["dense_matmul"].NUMBERS))


def bound_of(op: str, name: str, device: str = "cpu") -> float:
    """Of a case. bfloat16 has three bits less than float16; weights of routers and numbers in e4m3 are not rounded."""
    if name.startswith("route"):
        return 1e-6 if device == "cpu" else 1e-5
    if name == CASES["dense_matmul"].NUMBERS:
        return 0.0
    if "float32" in name:
        return 1e-6
    return BOUNDS[op] * (8 if "bfloat16" in name else 1)


def made(op: str, name: str, batch: int = 1, count: int = 1, dtype: torch.dtype = torch.float16) -> Any:
    """Inputs of a case."""
    cases = CASES[op]
    if op == "greedy_token":
        return cases.call(name, dtype)
    if op == "matmul_nbits":
        return replace(weight(FEW[name], dtype), input=tokens(FEW[name], batch, count, dtype))
    return cases.call(cases.CASES[name], batch, count, dtype)


def listed(found: Any) -> list[torch.Tensor]:
    return [found] if isinstance(found, torch.Tensor) else list(found)


def defined(op: str, given: Any) -> list[torch.Tensor]:
    """Outputs of the op's definition."""
    return listed(getattr(PLANS[op], f"naive_{op}")(given))


@pytest.mark.slow
@pytest.mark.parametrize("op, name", [case for case in EVERY if case[0] != "matmul_nbits" or case[1] in FAST])
def test_interpreter(op: str, name: str) -> None:
    names = FAST if op == "matmul_nbits" else ()
    assert run_cases(Path(str(CASES[op].__file__)), names)[name] <= bound_of(op, name)


@pytest.mark.long
@pytest.mark.parametrize("name", list(CASES["matmul_nbits"].CASES))
def test_interpreter_rest(name: str) -> None:
    cases = CASES["matmul_nbits"]
    assert run_cases(Path(str(cases.__file__)), tuple(cases.CASES))[name] <= BOUNDS["matmul_nbits"]


@pytest.mark.gpu
@pytest.mark.parametrize("op, name", EVERY)
def test_gpu(op: str, name: str) -> None:
    assert CASES[op].run_case(name, "cuda") <= bound_of(op, name, "cuda")


@pytest.mark.parametrize("op, name", [(op, name) for op, names in DEFINED.items() for name in names])
def test_definition(op: str, name: str) -> None:
    """Rounded where an output, or a number between two products, is stored; choices and roundings are exact."""
    bounds = {torch.float32: 1e-6, torch.float16: BOUNDS[op]}
    if not BOUNDS[op]:
        bounds = dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), 0.0)
    for dtype, bound in bounds.items():
        given = made(op, name, 2, 3, dtype)
        for result, wanted in zip(defined(op, given), listed(CASES[op].exact(given)), strict=True):
            if bound:
                assert (result.double() - wanted).norm() <= bound * wanted.norm()
            else:
                assert torch.equal(result, wanted)


def test_definition_of_one_number() -> None:
    """By hand: the gate is the first half, and the layer is added to what it reads."""
    one = torch.ones(1, 1, 1)
    given = replace(made("gated_mlp", "few", dtype=torch.float32), norm_epsilon=0.0, input=2 * one)
    given = replace(given, norm_weight=3 * one[0, 0], gate_up=torch.tensor([[1.0, 5.0]]), down=7 * one[0])
    assert naive_gated_mlp(given).item() == pytest.approx(2 + 3 / (1 + 2.718281828**-3) * 15 * 7)


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


def half(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float16)


ONE_OF = "one of weight, turned_weight and codes is wanted"


@pytest.mark.parametrize(
    ("op", "change", "message"),
    [
        ("add_rms_norm", {"residual": half(1, 1, 57)}, r"residual: expected \[1, 1, 56\]"),
        ("add_rms_norm", {"residual": torch.zeros(1, 1, 56)}, "residual: expected torch.float16, got torch.float32"),
        ("add_rms_norm", {"norm_weight": half(55)}, r"norm_weight: expected \[56\]"),
        ("dense_matmul", {"weight": None}, ONE_OF),
        ("dense_matmul", {"turned_weight": half(72, 200)}, ONE_OF),
        ("dense_matmul", {"weight": half(199, 72)}, r"weight: expected \[200, 72\], got \[199, 72\]"),
        ("dense_matmul", {"weight": torch.zeros(200, 72)}, "weight: expected torch.float16, got torch.float32"),
        ("dense_matmul", {"norm_weight": half(72)}, r"norm_weight: expected \[200\]"),
        ("dense_matmul", {"residual": half(1, 1, 200)}, r"residual: expected \[1, 1, 72\]"),
        ("dense_matmul", {"input": half(2, 200)}, r"expected \[B, T, I\]"),
        ("dense_matmul: e4m3, few", {"weight": half(208, 72)}, ONE_OF),
        ("dense_matmul: e4m3, few", {"scales": None}, "codes and scales go together"),
        ("dense_matmul: e4m3, few", {"scales": torch.ones(3, 72)}, "scales of 3 blocks do not divide I=208 inputs"),
        ("dense_matmul: e4m3, few", {"scales": torch.ones(1, 71)}, r"scales: expected \[1, 72\], got \[1, 71\]"),
        ("dense_matmul: e4m3, few", {"codes": half(72, 51).int()}, "codes have 51 words of four for I=208 inputs"),
        ("gated_mlp", {"input": half(2, 72)}, r"expected \[B, T, I\]"),
        ("gated_mlp", {"norm_weight": half(1)}, r"norm_weight: expected \[72\]"),
        ("gated_mlp", {"down": half(104, 8)}, r"down: expected \[104, 72\]"),
        ("gated_mlp", {"gate_up": half(72, 104)}, r"gate_up: expected \[72, 208\]"),
        ("gated_mlp", {"gate_up": torch.zeros(72, 208)}, "gate_up: expected torch.float16, got torch.float32"),
        ("greedy_token", {"logits": half(3, 5)}, r"logits: expected \[B, T, V\]"),
        ("low_rank_matmul", {"inner": half(71, 16)}, r"inner: expected \[72, 16\]"),
        ("low_rank_matmul", {"outer": half(15, 104)}, r"outer: expected \[16, 104\]"),
        ("low_rank_matmul", {"base": half(1, 1, 103)}, r"base: expected \[1, 1, 104\]"),
        ("low_rank_matmul", {"base": torch.zeros(1, 1, 104)}, "base: expected torch.float16, got torch.float32"),
        ("matmul_nbits", {"bits": 3}, "bits=3"),
        ("matmul_nbits", {"block_size": 256}, "block_size=256 does not divide I=32"),
        ("matmul_nbits", {"blocks": half(3, 5).int()}, "blocks have 5 words for I=32 inputs of 4 bits"),
        ("matmul_nbits", {"scales": torch.zeros(3, 1)}, "scales: expected torch.float16, got torch.float32"),
        ("matmul_nbits", {"zero_points": half(3, 2).int()}, "zero_points have 2 words for 1 blocks of 4 bits"),
        ("rotary_qkv", {"input": half(1, 1, 335)}, "are not the input's 335 together"),
        ("rotary_qkv", {"cos": torch.zeros(1, 1, 16)}, "cos: expected torch.float16, got torch.float32"),
        ("rotary_qkv", {"sin": half(1, 1, 8)}, r"sin: expected \[1, 1, 16\]"),
        ("rotary_qkv", {"gate_bias": half(9)}, r"gate_bias: expected \[104\]"),
        ("rotary_qkv", {"query_width": 136, "value_width": 48}, "query_width=136, key_width=48 are no heads of an even D=16"),
        ("rotary_qkv", {"value_width": 0, "gate_width": 144, "gate_bias": None}, "query, key and value must have numbers"),
        ("round_key_value", {"value": half(1, 1, 2, 64)}, r"value: expected \[1, 1, 3, 64\]"),
        ("round_key_value", {"value": torch.zeros(1, 1, 3, 64)}, "value: expected torch.float16, got torch.float32"),
        ("swi_glu", {"input": half(1, 1, 113)}, r"input: expected \[1, 1, 112\], got \[1, 1, 113\]"),
        ("swi_glu", {"width": 55}, r"input: expected \[1, 1, 110\]"),
        ("swi_glu", {"input": half(1, 112)}, r"input: expected \[B, T, 2\*width\]"),
    ],
    ids=str,
)  # fmt: skip
def test_what_does_not_fit_is_named(op: str, change: dict[str, Any], message: str) -> None:
    op, _, name = op.partition(": ")
    given = replace(made(op, name or FIRST[op]), **change)
    with pytest.raises(ShapeError, match=message):
        defined(op, given)


MULTIPLIES = {
    "DenseMatMul": r"(?!norm$|round8)",
    "GatedMlp": r"(?!norm$)",
    "LowRankMatMul": "",
    **dict.fromkeys(("Route", "Experts", "ExpertsNBits"), r".*scores$|some_|many_|few_codes_"),
}
"""Kernels of an op with matrix instructions."""
MACHINE_CODE: list[tuple[str, int, dict[str, Any]]] = [
    ("AddRmsNorm", 90, {}),
    ("DenseMatMul", 90, {}),
    ("Experts", 90, {"dtype": "bfloat16"}),
    ("ExpertsNBits", 90, {"dtype": "bfloat16"}),
    ("GatedMlp", 90, {}),
    ("GreedyToken", 90, {}),
    ("LowRankMatMul", 90, {"base": 1}),
    ("RotaryQkv", 90, {"gated": 1, "biased": 1}),
    ("RoundKeyValue", 90, {}),
    ("Route", 90, {}),
    ("SwiGlu", 90, {}),
]
"""One table an op, in every run."""
WIDE = {"span": 2, "gated_span": 3}
LONG: list[tuple[str, int, dict[str, Any]]] = [
    *(("AddRmsNorm", 90, fields) for fields in ({"wide": 1}, {"aligned": 0})),
    ("DenseMatMul", 90, {"span": 3, "float8": 1}),
    *(("GreedyToken", 90, fields) for fields in ({"dtype": "float32"}, {"aligned": 0})),
    ("LowRankMatMul", 90, {"aligned": 0}),
    ("RotaryQkv", 90, {"aligned": 0}),
    ("RoundKeyValue", 90, {"head_dim": 48}),
    ("Route", 90, {"score": "sigmoid", "biased": 1, "grouped": 1, "experts": 128}),
    ("SwiGlu", 90, {"aligned": 0}),
    *(
        ("DenseMatMul", 90, f)
        for f in ({"span": 3}, {"turned": 1, "normed": 1, "span": 3}, {"residual": 1}, {"aligned": 0})
    ),
    *(("DenseMatMul", arch, {"span": span}) for arch in (80, 89) for span in (3, 1)),
    *(
        ("DenseMatMul", arch, {"normed": 1, "residual": 1, "span": span, "float8": 1, "blocked": blocked})
        for arch in (89, 90)
        for span, blocked in ((0, 0), (2, 1))
    ),
    *(("GatedMlp", 90, fields) for fields in (WIDE, {"aligned": 0, "whole": 0})),
    *(("GatedMlp", arch, fields) for arch in (80, 89) for fields in ({}, WIDE)),
    ("Route", 90, {"dtype": "float32", "aligned": 0}),
    ("Experts", 90, {"aligned": 0, "activation": "relu2"}),
    ("Experts", 90, {"dtype": "float32"}),
    *(("Experts", arch, {}) for arch in (80, 89)),
    ("ExpertsNBits", 89, {"bits": 8, "zero_points": 0}),
    ("Experts", 120, {"experts": 512}),
]


def loops_of(code: list[Line]) -> list[tuple[int, int]]:
    """First and last address, of branches that go back."""
    goes = [(re.search(r"0x([0-9a-f]+)", line.operands), line) for line in code if line.name.startswith("BRA")]
    return [(to, line.address) for found, line in goes if found and (to := int(found[1], 16)) < line.address]


@pytest.mark.slow
@pytest.mark.parametrize(
    "op, arch, fields", [*MACHINE_CODE, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG)], ids=str
)
def test_machine_code(op: str, arch: int, fields: dict[str, Any], tmp_path: Path) -> None:
    """Nothing spills, of kernels whose registers are limited by measurement nothing within a loop; and no matrix instruction sums in half
    precision."""
    kernels = kernels_of(op)
    variant = kernels.variant(**fields)
    entry, cubins = compile_variant(op, variant, arch)
    tiles = kernels.build(variant, arch).tiles
    for name, kernel in entry["kernels"].items():
        code = lines(disassembly(cubins[kernel["cubin"]], tmp_path))
        spilled = [line for line in code if line.name.split(".")[0] in ("STL", "LDL")]
        if tiles[name].max_registers is not None:
            loops = loops_of(code)
            assert loops or not name.startswith("many_"), "loops are not seen"
            spilled = [line for line in spilled if any(a <= line.address <= b for a, b in loops)]
        assert not spilled, f"{name} spills"
        products = {line.name for line in code if line.name.startswith(("HMMA", "HGMMA", "QMMA", "QGMMA"))}
        assert bool(products) == (op in MULTIPLIES and re.match(MULTIPLIES[op], name) is not None), name
        assert all("F32" in part for part in products), products
        assert all((".E4M3" in part) == bool(getattr(variant, "float8", 0)) for part in products), products
