"""The core launches of still::Attention what the Python launcher launches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from still_graphs.spec import CACHE
from still_kernels.attention.meaning import AttentionState, Inputs
from still_kernels.attention.plan import Variant
from still_kernels.attention.spec import ATTENTION
from tests.plugins.test_launches import NAMES, fake_compiler, mirror  # noqa: F401  # fixtures

launch = pytest.importorskip("still_kernels.attention.call")

CASES = [
    # batch, tokens, heads, rows of the state, dtype, cache
    (1, 1, 6, 4096, torch.float16, "float"),
    (8, 1, 6, 65536, torch.bfloat16, "float"),
    (1, 1, 2, 0, torch.float32, "float"),
    (2, 10, 6, 4096, torch.float16, "float"),
    (2, 11, 6, 4096, torch.float16, "float"),
    (1, 2048, 6, 65536, torch.float32, "float"),
    (3, 200, 6, 4096, torch.float16, "float"),
    (8, 1, 6, 65536, torch.float16, "int8"),
    (3, 200, 6, 4096, torch.float32, "int8"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_the_core_mirrors_the_python_launcher(case: Any, mirror: Callable[..., None]) -> None:  # noqa: F811
    batch, tokens, heads, rows, dtype, cache = case
    lead, count = (batch, tokens), torch.int32

    def made(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=kind, device="meta")

    tensors = {
        "query": made(*lead, heads, 64),
        "key": made(*lead, 2, 64),
        "value": made(*lead, 2, 64),
        "past_length": made(batch, kind=count),
        "new_tokens": made(batch, kind=count),
    }
    state = AttentionState.empty(batch, 2, 64, rows, dtype, "meta", cache)
    state = dataclasses.replace(state, length=tensors["past_length"])
    tensors |= {f"past_{name}": tensor for name, tensor in state.tensors().items()}
    inputs = Inputs(*(tensors.get(n) for n in ("query", "key", "value", "new_tokens")))

    def run(output: torch.Tensor) -> None:
        launch.launch_attention(inputs, state, output)

    variant = Variant(dtype=NAMES[dtype], head_dim=64, cache=cache, count_dtype="int32")
    mirror(ATTENTION, tensors, run, variant, {CACHE.name: cache})
