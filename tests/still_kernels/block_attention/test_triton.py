"""The Triton kernels of still::SelectBlocks and still::BlockAttention: in the interpreter here, compiled on a GPU; plans; AOT."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import pytest
import torch

from still_kernels.registry import kernels_of
from still_kernels.tile import SHARED_BYTES
from tests.compiled import Before, inputs
from tests.still_kernels.interpreted import run_cases
from tests.tolerances import REFERENCE

pytest.importorskip("triton")
triton_cases = pytest.importorskip("tests.still_kernels.block_attention.triton_cases")
SCRIPT = Path(__file__).with_name("triton_cases.py")
interpreted = functools.partial(run_cases, SCRIPT, kind="float32")
FAST = ("steps", "prompts")
OPS = ("SelectBlocks", "BlockAttention")


def check(errors: dict[str, float], dtype: torch.dtype) -> None:
    """Clear choices are compared by the case; others are few."""
    assert errors["blocks"] < 1e-3 and errors["sums"] <= 1e-5
    assert errors["output"] <= REFERENCE[dtype]


@pytest.mark.parametrize("name", FAST)
def test_interpreter(name: str) -> None:
    check(interpreted(FAST)[name], torch.float32)


def test_of_equal_scores_the_first_is_taken() -> None:
    interpreted((), kind="ties")


@pytest.mark.slow
def test_ops_of_pytorch_run_the_kernels() -> None:
    interpreted((), kind="dispatch")


@pytest.mark.gpu
def test_ops_of_pytorch_run_the_kernels_on_a_gpu() -> None:
    triton_cases.run_dispatch("cuda")


@pytest.mark.slow
@pytest.mark.parametrize("name", ("steps", "large group"))
def test_programs_may_run_in_any_order(name: str) -> None:
    check(interpreted(("steps", "large group"), kind="shuffled")[name], torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "names"), [("bfloat16", FAST), ("float16", ("steps",))])
def test_interpreter_in_16_bits(dtype: str, names: tuple[str, ...]) -> None:
    """Each has its own number of parts of a product; what a span of tokens changes is the same in both."""
    for errors in interpreted(names, kind=dtype).values():
        check(errors, getattr(torch, dtype))


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in triton_cases.CASES if n not in FAST])
def test_interpreter_rest(name: str) -> None:
    check(interpreted(tuple(n for n in triton_cases.CASES if n not in FAST))[name], torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", list(triton_cases.CASES))
def test_gpu(name: str, dtype: torch.dtype) -> None:
    check(triton_cases.run_case(name, "cuda", dtype), dtype)


@pytest.mark.gpu
def test_gpu_of_equal_scores_the_first_is_taken() -> None:
    triton_cases.run_ties("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gpu_published_sizes(dtype: torch.dtype) -> None:
    """MiniCPM-SALA's layer: a prompt beyond the dense length in two calls, then steps."""
    triton_cases.run_published("cuda", dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arch", [86, pytest.param(90, marks=pytest.mark.long), pytest.param(120, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("op", OPS)
def test_ahead_of_time(op: str, arch: int, monkeypatch: pytest.MonkeyPatch, compiled_before: Before) -> None:
    from still_kernels import aot

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    kernels = kernels_of(op)
    if compiled_before(inputs(op, kernels.variant(), arch)):
        return
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("TRITON_CACHE_DIR", folder)
        entry, _ = aot.compile_variant(op, kernels.variant(), arch)
    assert set(entry["kernels"]) == set(kernels.functions())
    assert all(kernel["shared_bytes"] <= SHARED_BYTES[arch] for kernel in entry["kernels"].values())
