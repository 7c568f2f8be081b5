"""The kernels of still::GatedMlp against float64: in Triton's interpreter, compiled on a GPU; and their machine code."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from still_graphs.errors import ShapeError, UnsupportedError
from still_kernels.gated_mlp.plan import naive_gated_mlp
from tests.gated_mlp_cases import call, exact
from tests.still_kernels.interpreted import run_cases

pytest.importorskip("triton")
cases = pytest.importorskip("tests.still_kernels.gated_mlp.cases")
from still_kernels.aot import compile_variant  # noqa: E402
from still_kernels.gated_mlp.plan import Variant  # noqa: E402
from tests.compiled import Before, inputs  # noqa: E402
from tests.machine_code import disassembly, lines  # noqa: E402

interpreted = functools.partial(run_cases, Path(__file__).with_name("cases.py"))
BOUND = 4e-4
"""Outputs are rounded to float16: 2.1e-4 by Frobenius norm."""


@pytest.mark.slow
@pytest.mark.parametrize("name", list(cases.CASES))
def test_interpreter(name: str) -> None:
    assert interpreted()[name] <= BOUND


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(cases.CASES))
def test_gpu(name: str) -> None:
    assert cases.run_case(name, "cuda") <= BOUND


def test_definition() -> None:
    """In float32 and in float16, which is rounded at norms, between the products and at the end."""
    for dtype, bound in ((torch.float32, 1e-6), (torch.float16, BOUND)):
        given = call(cases.CASES["few"], 2, 3, dtype)
        expected = exact(given)
        assert (naive_gated_mlp(given).double() - expected).norm() <= bound * expected.norm()


def test_definition_of_one_number() -> None:
    """By hand: the gate is the first half, and the layer is added to what it reads."""
    one = torch.ones(1, 1, 1)
    given = replace(
        call(cases.CASES["few"], 1, 1, torch.float32), norm_epsilon=0.0, input=2 * one, norm_weight=3 * one[0, 0]
    )
    given = replace(given, gate_up=torch.tensor([[1.0, 5.0]]), down=7 * one[0])
    assert naive_gated_mlp(given).item() == pytest.approx(2 + 3 / (1 + 2.718281828**-3) * 15 * 7)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"input": torch.zeros(2, 72).half()}, r"expected \[B, T, I\]"),
        ({"norm_weight": torch.zeros(1).half()}, r"norm_weight: expected \[72\]"),
        ({"down": torch.zeros(104, 8).half()}, r"down: expected \[104, 72\]"),
        ({"gate_up": torch.zeros(72, 104).half()}, r"gate_up: expected \[72, 208\]"),
        ({"gate_up": torch.zeros(72, 208)}, "gate_up: expected torch.float16, got torch.float32"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_named(change: dict[str, torch.Tensor], message: str) -> None:
    given = replace(call(cases.CASES["few"], 1, 1), **change)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match=message):
        naive_gated_mlp(given)


def test_unknown_device_is_refused() -> None:
    from still_kernels.gated_mlp.plan import OP

    with pytest.raises(UnsupportedError, match="device 'cpu'"):
        OP.run(call(cases.CASES["few"], 1, 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    "arch, variant",
    [
        (90, Variant()),
        *[pytest.param(90, v, marks=pytest.mark.long) for v in (Variant(span=2, gated_span=3), Variant(aligned=0, whole=0))],
        *[pytest.param(arch, v, marks=pytest.mark.long) for arch in (80, 89) for v in (Variant(), Variant(span=2, gated_span=3))],
    ],
    ids=str,
)  # fmt: skip
def test_machine_code(arch: int, variant: Variant, tmp_path: Path, compiled_before: Before) -> None:
    """No kernel spills, and no matrix instruction sums in half precision."""
    if compiled_before(inputs("GatedMlp", variant, arch)):
        return
    entry, cubins = compile_variant("GatedMlp", variant, arch)
    for name, kernel in entry["kernels"].items():
        found = [line.name for line in lines(disassembly(cubins[kernel["cubin"]], tmp_path))]
        assert not {"STL", "LDL"} & {n.split(".")[0] for n in found}, f"{name} spills"
        products = {n for n in found if n.startswith(("HMMA", "HGMMA"))}
        assert bool(products) == (name != "norm") and all(".F32" in n for n in products), products
