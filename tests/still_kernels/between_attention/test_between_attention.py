"""The kernel of still::BetweenAttention against float64 on a GPU; what it covers, its definition, its machine code."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from still_graphs.errors import ShapeError, UnsupportedError
from still_graphs.ops.between_attention import in_one_launch
from still_kernels.between_attention import naive_between_attention
from tests.between_attention_cases import CASES, Case, call, exact

pytest.importorskip("triton")
cases = pytest.importorskip("tests.still_kernels.between_attention.cases")
from still_kernels.aot import compile_variant, source_hash  # noqa: E402
from still_kernels.between_attention import OP, Variant  # noqa: E402
from still_kernels.common.cuda_function import can_compile  # noqa: E402
from still_kernels.plan import Call  # noqa: E402
from tests.machine_code import disassembly, lines  # noqa: E402

BOUND = {torch.float32: 1e-6, torch.float16: 6e-4, torch.bfloat16: 5e-3}
"""Outputs are rounded: 2.1e-4 by Frobenius norm in float16, and a number in between may be rounded the other way."""


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", list(CASES))
def test_gpu(name: str, dtype: torch.dtype) -> None:
    assert cases.run_case(name, dtype) <= BOUND[dtype]


@pytest.mark.gpu
def test_again_and_again() -> None:
    """Behind each other, on two streams at a time and from a graph: the same bits, for every launch leaves words of zeros."""
    given = call(CASES["SmolLM2-135M"])
    moved = {name: x.cuda() for name, x in vars(given).items() if isinstance(x, torch.Tensor)}
    given = replace(given, **moved)  # type: ignore[arg-type]
    first, found = OP.run(given), []
    streams = [torch.cuda.Stream() for _ in range(2)]
    for _ in range(200):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(OP.run(given))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found += [OP.run(given) for _ in range(5)]
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for each in found for x, y in zip(first, each, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["sizes that all differ", "without a gate"])
def test_definition(name: str, dtype: torch.dtype) -> None:
    """Numbers are rounded at norms, between the products and at the end."""
    given = call(CASES[name], dtype=dtype)
    for found, expected in zip(naive_between_attention(given), exact(given), strict=True):
        assert (found.double() - expected).norm() <= BOUND[dtype] * expected.norm()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"residual": torch.zeros(1, 1, 71).half()}, "output_weight: expected"),
        ({"output_weight": torch.zeros(8, 208).half()}, r"output_weight: expected \[80, 208\]"),
        ({"gate_up": torch.zeros(208, 48).half()}, r"gate_up: expected \[208, 96\]"),
        ({"next_gate_weight": torch.zeros(208, 16).half()}, r"next_gate_weight: expected \[208, 32\]"),
        ({"next_gate_weight": None}, "gate_width=32: a gate's weight has one"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_named(change: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        naive_between_attention(replace(call(CASES["sizes that all differ"]), **change))  # type: ignore[arg-type]


def test_several_tokens_are_refused() -> None:
    with pytest.raises(ShapeError, match="6 tokens: the kernel takes one"):
        naive_between_attention(call(CASES["sizes that all differ"], 2, 3))


def test_unknown_device_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="device 'cpu'"):
        OP.run(call(CASES["sizes that all differ"]))


OTHERS = [Case(960, 960, 2560, 1600), Case(576, 576, 1536, 960, 592), Case(576, 568, 1536, 960), Case(3472, 64, 64, 64)]


@pytest.mark.parametrize("case", [*CASES.values(), *OTHERS, Case(64, 1552, 16, 16)], ids=str)
def test_who_takes_one_launch(case: Case) -> None:
    """Kernels cover what graphs take them for, one token."""
    sizes = case.attended, case.width, case.middle, case.outputs, case.gate
    given = call(case)
    shapes = {name: x.shape for name, x in vars(given).items() if isinstance(x, torch.Tensor)}
    attributes = {"norm_epsilon": 1e-5, "gate_width": case.gate}
    seen = Call.of(OP.kernels.spec, shapes, attributes, "float16", None)
    assert (not OP.kernels.refusals(seen)) == in_one_launch(*sizes) == (case in CASES.values())
    steps = OP.kernels.plan.evaluate(seen).steps
    assert [(step.kernel, step.grid) for step in steps] == [("between", (sum(sizes[1:], case.width) // 16, 1, 1))]


@pytest.mark.skipif(not can_compile(), reason="needs NVRTC")
@pytest.mark.parametrize("variant", [Variant(), Variant("bfloat16", 80, 208, 48, 112, 0)], ids=str)
def test_machine_code(variant: Variant, tmp_path: Path) -> None:
    """The archive's kernel does not spill, and its matrix instructions sum in float32; what it is made of is in the archive's hash."""
    entry, cubins = compile_variant("BetweenAttention", variant, 90)
    kernel = entry["kernels"]["between"]
    found = [line.name for line in lines(disassembly(cubins[kernel["cubin"]], tmp_path))]
    assert not {"STL", "LDL"} & {n.split(".")[0] for n in found}
    products = {n for n in found if n.startswith("HMMA")}
    assert products and all(".F32" in n for n in products), products
    assert [a["type"] for a in kernel["args"]] == ["ptr"] * (13 if variant.gate else 11) + ["f32"]


def test_the_source_is_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    before, read = source_hash(OP.kernels), Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + (b" " if path.suffix == ".cu" else b""))
    assert source_hash(OP.kernels) != before
