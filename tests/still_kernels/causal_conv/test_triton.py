"""The Triton kernels of still::CausalConv against the loop over tokens: in the interpreter here, compiled on a GPU."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from still_graphs.errors import UnsupportedError
from still_kernels.plan import Call
from still_kernels.registry import kernels_of
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


@pytest.mark.parametrize(
    ("sizes", "dtype", "message"), [({"K": 20}, "float16", "20 taps"), ({}, "float64", "float64")], ids=str
)
def test_refusals(sizes: dict[str, int], dtype: str, message: str) -> None:
    """What no kernel covers, with what is covered."""
    call = Call({"B": 1, "T": 1, "C": 8, "K": 4, "P": 3, **sizes}, {"activation": "silu"}, {}, dtype=dtype)
    assert [r for r in kernels_of("CausalConv").refusals(call) if message in r and "the kernels have" in r]


@pytest.mark.parametrize(
    ("sizes", "weight", "message"),
    [
        ({}, (1, 1, 4), "input C=8; a grouped convolution"),
        ({"P": 4}, (8, 1, 4), "K=4 taps need K - 1 columns of state"),
    ],
)
def test_calls_that_make_no_sense(sizes: dict[str, int], weight: tuple[int, ...], message: str) -> None:
    call = Call({"B": 1, "T": 1, "C": 8, "K": 4, "P": 3, **sizes}, {"activation": "silu"}, shapes={"weight": weight})
    with pytest.raises(UnsupportedError, match=message):
        kernels_of("CausalConv").plan.check(call)


def test_unknown_device_is_refused() -> None:
    from still_kernels.causal_conv.call import triton_causal_conv
    from still_kernels.causal_conv.meaning import Inputs, empty_state

    with pytest.raises(UnsupportedError, match="device 'cpu'"):
        triton_causal_conv(Inputs(torch.zeros(1, 1, 5), torch.zeros(5, 1, 4)), empty_state(1, 5, 4))
