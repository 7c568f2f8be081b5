"""The kernel of still::GreedyToken against NumPy: in Triton's interpreter, compiled on a GPU; and its machine code."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from still_graphs.errors import ShapeError
from still_kernels.greedy_token.plan import Inputs, naive_greedy_token
from tests.still_kernels.interpreted import run_cases

pytest.importorskip("triton")
cases = pytest.importorskip("tests.still_kernels.greedy_token.cases")
from still_kernels.aot import compile_variant  # noqa: E402
from still_kernels.greedy_token.plan import Variant  # noqa: E402
from tests.compiled import Before, inputs  # noqa: E402
from tests.machine_code import disassembly, lines  # noqa: E402

interpreted = functools.partial(run_cases, Path(__file__).with_name("cases.py"))


@pytest.mark.slow
@pytest.mark.parametrize("name", cases.CASES)
def test_interpreter(name: str) -> None:
    assert interpreted()[name] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", cases.CASES)
def test_gpu(name: str) -> None:
    assert cases.run_case(name, "cuda") == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_gpu_of_a_whole_vocabulary(dtype: torch.dtype) -> None:
    from still_kernels.greedy_token.plan import OP

    logits = torch.randn(8, 1, 128256, device="cuda").to(dtype)
    logits[:, :, 128255] = logits[:, :, 77] = 9.0
    assert OP.run(Inputs(logits)).tolist() == [[77]] * 8


@pytest.mark.parametrize("name", cases.CASES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_definition(name: str, dtype: torch.dtype) -> None:
    given = cases.call(name, dtype)
    assert torch.equal(naive_greedy_token(given), cases.exact(given))


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(ShapeError, match=r"logits: expected \[B, T, V\]"):
        naive_greedy_token(Inputs(torch.zeros(3, 5)))


@pytest.mark.slow
@pytest.mark.parametrize("variant", [Variant(), Variant("float32"), Variant(aligned=0)], ids=str)
def test_machine_code(variant: Variant, tmp_path: Path, compiled_before: Before) -> None:
    """Nothing spills."""
    if compiled_before(inputs("GreedyToken", variant, 90)):
        return
    entry, cubins = compile_variant("GreedyToken", variant, 90)
    (kernel,) = entry["kernels"].values()
    found = {line.name.split(".")[0] for line in lines(disassembly(cubins[kernel["cubin"]], tmp_path))}
    assert not {"STL", "LDL"} & found
