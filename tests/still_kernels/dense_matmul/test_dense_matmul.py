"""The kernels of still::DenseMatMul against products in float64: in Triton's interpreter, compiled on a GPU; and their machine code."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
import torch

from still_graphs.errors import ConfigError, ShapeError, UnsupportedError
from still_kernels.dense_matmul.plan import Inputs, naive_dense_matmul
from still_kernels.plan import Call
from still_kernels.registry import kernels_of
from tests.dense_matmul_cases import FEW, FLOAT8, call, every_number, exact
from tests.still_kernels.interpreted import run_cases

pytest.importorskip("triton")
cases = pytest.importorskip("tests.still_kernels.dense_matmul.cases")
from still_kernels.aot import compile_variant  # noqa: E402
from still_kernels.dense_matmul.plan import Variant, tile_table  # noqa: E402
from tests.compiled import Before, inputs  # noqa: E402
from tests.machine_code import disassembly, lines  # noqa: E402

interpreted = functools.partial(run_cases, Path(__file__).with_name("cases.py"))
BOUND = 4e-4
"""Outputs are rounded to float16: 2.1e-4 by Frobenius norm. Sums in half precision of these inputs are off by more than twice that."""


@pytest.mark.slow
@pytest.mark.parametrize("name", list(cases.CASES))
def test_interpreter(name: str) -> None:
    assert interpreted()[name] <= BOUND


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(cases.CASES))
def test_gpu(name: str) -> None:
    assert cases.run_case(name, "cuda") <= BOUND


@pytest.mark.slow
def test_every_number_in_e4m3() -> None:
    assert interpreted()[cases.NUMBERS] == 0


@pytest.mark.gpu
def test_every_number_in_e4m3_on_a_gpu() -> None:
    assert cases.run_case(cases.NUMBERS, "cuda") == 0


@pytest.mark.parametrize("name", [*FEW, *FLOAT8])
def test_definition(name: str) -> None:
    """In float32 and in float16, which is rounded once."""
    for dtype, bound in ((torch.float32, 1e-6), (torch.float16, BOUND)):
        given = call({**FEW, **FLOAT8}[name], 2, 3, dtype)
        expected = exact(given)
        assert (naive_dense_matmul(given).double() - expected).norm() <= bound * expected.norm()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"weight": None}, "one of weight, turned_weight and codes is wanted"),
        ({"turned_weight": torch.zeros(72, 200).half()}, "one of weight, turned_weight and codes is wanted"),
        ({"weight": torch.zeros(199, 72).half()}, r"weight: expected \[200, 72\], got \[199, 72\]"),
        ({"weight": torch.zeros(200, 72)}, "weight: expected torch.float16, got torch.float32"),
        ({"norm_weight": torch.zeros(72).half()}, r"norm_weight: expected \[200\]"),
        ({"residual": torch.zeros(1, 1, 200).half()}, r"residual: expected \[1, 1, 72\]"),
        ({"input": torch.zeros(2, 200).half()}, r"expected \[B, T, I\]"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_named(change: dict[str, torch.Tensor | None], message: str) -> None:
    given = Inputs(**{**vars(call(FEW["few"], 1, 1)), **change})  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match=message):
        naive_dense_matmul(given)


def test_definition_rounds_every_number_as_torch_does() -> None:
    given, expected = every_number()
    assert torch.equal(naive_dense_matmul(given).nan_to_num(), expected.nan_to_num())
    assert naive_dense_matmul(given)[0, :2].isnan().all()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"weight": torch.zeros(208, 72).half()}, "one of weight, turned_weight and codes is wanted"),
        ({"scales": None}, "codes and scales go together"),
        ({"scales": torch.ones(3, 72)}, "scales of 3 blocks do not divide I=208 inputs"),
        ({"scales": torch.ones(1, 71)}, r"scales: expected \[1, 72\], got \[1, 71\]"),
        ({"codes": torch.zeros(72, 51, dtype=torch.int32)}, "codes have 51 words of four for I=208 inputs"),
    ],
    ids=str,
)
def test_codes_that_do_not_fit_are_named(change: dict[str, torch.Tensor | None], message: str) -> None:
    given = Inputs(**{**vars(call(FLOAT8["e4m3, few"], 1, 1)), **change})  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match=message):
        naive_dense_matmul(given)


@pytest.mark.parametrize(
    "inputs, blocks, message",
    [(200, 1, "I=200 inputs; .* multiples of 16"), (256, 4, "scales are 4 for I=256 inputs; .* for each 128 inputs")],
)
def test_codes_that_no_kernel_covers_are_named(inputs: int, blocks: int, message: str) -> None:
    sizes = {"B": 1, "T": 1, "I": inputs, "O": 8, "IW": inputs // 4, "IS": blocks}
    seen = Call(sizes, {"norm_epsilon": 1e-5}, dtype="float16", present=frozenset({"codes", "scales"}))
    (reason,) = kernels_of("DenseMatMul").refusals(seen)
    assert re.search(message, reason)


def test_architectures_without_e4m3_are_named() -> None:
    with pytest.raises(ConfigError, match="sm_86 has no matrix instructions for e4m3"):
        tile_table(Variant(float8=1), 86)


def test_refusals() -> None:
    """What no kernel covers, with what is covered."""
    kernels, sizes = kernels_of("DenseMatMul"), {"B": 1, "T": 1, "I": 64, "O": 8}
    seen = Call(sizes, {"norm_epsilon": 1e-5}, dtype="float32", present=frozenset({"weight"}))
    assert kernels.refusals(seen) == [
        "activations are float32; GEMMs with dense weights have kernels for float16, bfloat16."
    ]
    with pytest.raises(UnsupportedError, match="one of weight, turned_weight and codes is wanted"):
        kernels.plan.check(Call(sizes, {"norm_epsilon": 1e-5}, dtype="float16", present=frozenset()))


def test_unknown_device_is_refused() -> None:
    from still_kernels.dense_matmul.plan import OP

    with pytest.raises(UnsupportedError, match="device 'cpu'"):
        OP.run(call(FEW["few"], 1, 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    "arch, variant",
    [
        (90, Variant()),
        (90, Variant(span=3, float8=1)),
        *[
            pytest.param(90, v, marks=pytest.mark.long)
            for v in (Variant(span=3), Variant(turned=1, normed=1, span=3), Variant(residual=1), Variant(aligned=0))
        ],
        *[
            pytest.param(arch, v, marks=pytest.mark.long)
            for arch in (80, 89)
            for v in (Variant(span=3), Variant(span=1))
        ],
        *[
            pytest.param(
                arch, Variant(normed=1, residual=1, span=span, float8=1, blocked=blocked), marks=pytest.mark.long
            )
            for arch in (89, 90)
            for span, blocked in ((0, 0), (2, 1))
        ],
    ],
    ids=str,
)
def test_machine_code(arch: int, variant: Variant, tmp_path: Path, compiled_before: Before) -> None:
    """No kernel spills, and no matrix instruction sums in half precision."""
    if compiled_before(inputs("DenseMatMul", variant, arch)):
        return
    entry, cubins = compile_variant("DenseMatMul", variant, arch)
    for name, kernel in entry["kernels"].items():
        code = lines(disassembly(cubins[kernel["cubin"]], tmp_path))
        found = [line.name for line in code]
        assert not {"STL", "LDL"} & {n.split(".")[0] for n in found}, f"{name} spills"
        products = {n for n in found if n.startswith(("HMMA", "HGMMA", "QMMA", "QGMMA"))}
        assert bool(products) == (name not in ("norm", "round8", "round8_short")) and all(
            ".F32" in n for n in products
        ), products
        assert all((".E4M3" in n) == bool(variant.float8) for n in products), products
