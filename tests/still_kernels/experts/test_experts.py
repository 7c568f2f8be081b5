"""The kernels of still::Route, Experts and ExpertsNBits: in Triton's interpreter, compiled on a GPU; and their machine code."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from still_kernels.experts.meaning import naive_experts
from still_kernels.plan import Call
from still_kernels.registry import kernels_of
from tests.experts_cases import experts_inputs
from tests.still_kernels.interpreted import run_cases

pytest.importorskip("triton")
cases = pytest.importorskip("tests.still_kernels.experts.cases")
from still_kernels.aot import compile_variant  # noqa: E402
from tests.compiled import Before, inputs  # noqa: E402
from tests.machine_code import Line, disassembly, lines  # noqa: E402

interpreted = functools.partial(run_cases, Path(__file__).with_name("cases.py"))
BOUND = 6e-4
"""Outputs and what lies between two matrices are rounded to float16, 2.1e-4 by Frobenius norm each, of many tokens parts, too."""


def bound_of(name: str) -> float:
    """Of experts: bfloat16 has three bits less than float16."""
    return 1e-6 if "float32" in name and "bfloat16" not in name else 8 * BOUND if "bfloat16" in name else BOUND


@pytest.mark.slow
@pytest.mark.parametrize("name", cases.CASES)
def test_interpreter(name: str) -> None:
    assert interpreted()[name] <= (1e-6 if name.startswith("route") else bound_of(name))


@pytest.mark.gpu
@pytest.mark.parametrize("name", cases.CASES)
def test_gpu(name: str) -> None:
    assert cases.run_case(name, "cuda") <= (1e-5 if name.startswith("route") else bound_of(name))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("tokens", [1, 5, 70, 3000])
def test_other_types(dtype: torch.dtype, tokens: int) -> None:
    from still_kernels.experts.plan import OP

    given = experts_inputs(1, tokens, dtype=dtype)
    on_gpu = replace(given, **{name: x.cuda() for name, x in vars(given).items() if isinstance(x, torch.Tensor)})
    found, expected = OP(on_gpu).cpu().double(), naive_experts(given).double()
    assert (found - expected).norm() <= {torch.bfloat16: 8e-3, torch.float32: 1e-5}[dtype] * expected.norm()


@pytest.mark.gpu
def test_graphs() -> None:
    """A step in a CUDA graph reads nothing back: other experts at a replay give what they give outside of it."""
    from still_kernels.experts.plan import OP

    for tokens in (1, 70):
        given = experts_inputs(1, tokens, dtype=torch.float16)
        held = replace(given, **{name: x.cuda() for name, x in vars(given).items() if isinstance(x, torch.Tensor)})
        OP(held)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = OP(held)
        held.expert.copy_((held.expert + 1) % len(held.down))
        graph.replay()
        assert torch.equal(output, OP(held))


@pytest.mark.parametrize(
    "op, sizes, attributes, present, message",
    [
        ("ExpertsNBits", {"block_size": 16}, {"block_size": 16, "bits": 4}, (), "block_size=16; the kernels have"),
        ("ExpertsNBits", {}, {"block_size": 32, "bits": 2}, (), "bits=2; the kernels have 4 and 8"),
    ],
)
def test_refusals(
    op: str, sizes: dict[str, int], attributes: dict[str, Any], present: tuple[str, ...], message: str
) -> None:
    """What no kernel covers, with what is covered."""
    call = Call({"B": 1, "T": 1, "I": 64, **sizes}, {"activation": "swiglu", **attributes}, dtype="float16")
    assert any(message in reason for reason in kernels_of(op).refusals(call))


@pytest.mark.parametrize(
    "sizes, message",
    [({"k": 9}, "k=9 of 8 experts, 8 of which"), ({"groups": 3}, "groups must divide them"), ({"k": 3, "groups": 4}, "2 of which")],
)  # fmt: skip
def test_calls_of_a_router_that_do_not_go_together(sizes: dict[str, int], message: str) -> None:
    """The hosts' check, which sees no tensor."""
    kernels = kernels_of("Route")
    attributes = {a.name: a.default for a in kernels.spec.attributes} | sizes
    call = Call({"B": 1, "T": 1, "I": 64, "E": 8, "k": attributes["k"]}, attributes, dtype="float16")
    with pytest.raises(Exception, match=message):
        kernels.plan.check(call)


VARIANTS: list[tuple[str, int, dict[str, Any]]] = [
    ("Route", 90, {}),
    ("Route", 90, {"score": "sigmoid", "biased": 1, "grouped": 1, "experts": 128}),
    ("Experts", 90, {"dtype": "bfloat16"}),
    ("ExpertsNBits", 90, {"dtype": "bfloat16"}),
]
LONG: list[tuple[str, int, dict[str, Any]]] = [
    ("Route", 90, {"dtype": "float32", "aligned": 0}),
    ("Experts", 90, {"aligned": 0, "activation": "relu2"}),
    ("Experts", 90, {"dtype": "float32"}),
    ("Experts", 80, {}),
    ("Experts", 89, {}),
    ("ExpertsNBits", 89, {"bits": 8, "zero_points": 0}),
    ("Experts", 120, {"experts": 512}),
]


def _target(line: Line) -> int | None:
    """Where a branch goes."""
    found = re.search(r"0x([0-9a-f]+)", line.operands) if line.name.startswith("BRA") else None
    return int(found[1], 16) if found else None


@pytest.mark.slow
@pytest.mark.parametrize(
    "op, arch, fields", [*VARIANTS, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG)], ids=str
)
def test_machine_code(op: str, arch: int, fields: dict[str, Any], tmp_path: Path, compiled_before: Before) -> None:
    """Nothing spills, of kernels whose registers are limited by measurement nothing within a loop; and no matrix instruction sums in half
    precision."""
    kernels = kernels_of(op)
    variant = kernels.variant(**fields)
    if compiled_before(inputs(op, variant, arch)):
        return
    entry, cubins = compile_variant(op, variant, arch)
    tiles = kernels.build(variant, arch).tiles
    for name, kernel in entry["kernels"].items():
        code = lines(disassembly(cubins[kernel["cubin"]], tmp_path))
        loops = [
            (start, line.address) for line in code if (start := _target(line)) is not None and start < line.address
        ]
        assert loops or not name.startswith("many_"), "loops are not seen"
        spilled = [line for line in code if line.name.split(".")[0] in ("STL", "LDL")]
        if tiles[name].max_registers is not None:
            spilled = [line for line in spilled if any(a <= line.address <= b for a, b in loops)]
        assert not spilled, f"{name} spills"
        found = {line.name for line in code}
        products = {part for part in found if part.startswith(("HMMA", "HGMMA"))}
        multiplies = name.endswith("scores") or name.startswith(("some_", "many_", "few_codes_"))
        assert bool(products) == multiplies, name
        assert all("F32" in part for part in products), products
