"""The Triton kernels of still::CausalConv against the loop over tokens: in the interpreter here, compiled on a GPU."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from tests.still_kernels.interpreted import run_cases
from tests.tolerances import REFERENCE

pytest.importorskip("triton")
triton_cases = pytest.importorskip("tests.still_kernels.causal_conv.triton_cases")
SCRIPT = Path(__file__).with_name("triton_cases.py")
interpreted = functools.partial(run_cases, SCRIPT, kind="float32")
FAST = ("layer 0", "prompt", "with bias")


@pytest.mark.parametrize("name", FAST)
def test_interpreter(name: str) -> None:
    assert interpreted(FAST)[name] <= REFERENCE[torch.float32]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["float32", "shuffled", "bfloat16", "float16"])
@pytest.mark.parametrize("name", list(triton_cases.CASES))
def test_interpreter_rest(name: str, kind: str) -> None:
    dtype = torch.float32 if kind == "shuffled" else getattr(torch, kind)
    assert interpreted(tuple(triton_cases.CASES), kind=kind)[name] <= REFERENCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", list(triton_cases.CASES))
def test_gpu(name: str, dtype: torch.dtype) -> None:
    assert triton_cases.run_case(name, "cuda", dtype) <= REFERENCE[dtype]
