"""The Triton kernels of still::SelectBlocks and still::BlockAttention: on a GPU and ahead of time."""

from __future__ import annotations

import tempfile

import pytest
import torch

from still_kernels.registry import kernels_of
from still_kernels.tile import SHARED_BYTES

pytest.importorskip("triton")
triton_cases = pytest.importorskip("tests.still_kernels.block_attention.triton_cases")
OPS = ("SelectBlocks", "BlockAttention")


@pytest.mark.gpu
def test_ops_of_pytorch_run_the_kernels_on_a_gpu() -> None:
    triton_cases.run_dispatch("cuda")


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
def test_ahead_of_time(op: str, arch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from still_kernels import aot

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    kernels = kernels_of(op)
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("TRITON_CACHE_DIR", folder)
        entry, _ = aot.compile_variant(op, kernels.variant(), arch)
    assert set(entry["kernels"]) == set(kernels.functions())
    assert all(kernel["shared_bytes"] <= SHARED_BYTES[arch] for kernel in entry["kernels"].values())
