"""The core launches of still::Attention what the Python launcher launches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from still_graphs.ops.attention import ATTENTION
from still_graphs.ops.spec import CACHE
from still_kernels.attention import AttentionState, Inputs
from still_kernels.attention.variants import Variant
from still_kernels.packing import Packing
from tests.plugins.test_launches import NAMES, fake_compiler, mirror  # noqa: F401  # fixtures

launch = pytest.importorskip("still_kernels.attention.launch")

CASES = [
    # batch, tokens, heads, rows of the state, dtype, tokens of packed rows together, cache
    (1, 1, 6, 4096, torch.float16, 0, "float"),
    (8, 1, 6, 65536, torch.bfloat16, 0, "float"),
    (1, 1, 2, 0, torch.float32, 0, "float"),
    (2, 10, 6, 4096, torch.float16, 0, "float"),
    (2, 11, 6, 4096, torch.float16, 0, "float"),
    (1, 2048, 6, 65536, torch.float32, 0, "float"),
    (3, 1, 6, 4096, torch.bfloat16, 2, "float"),
    (3, 200, 6, 4096, torch.float16, 333, "float"),
    (8, 1, 6, 65536, torch.float16, 0, "int8"),
    (3, 200, 6, 4096, torch.float32, 333, "int8"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_the_core_mirrors_the_python_launcher(case: Any, mirror: Callable[..., None]) -> None:  # noqa: F811
    batch, tokens, heads, rows, dtype, packed, cache = case
    lead, count = ((packed,) if packed else (batch, tokens)), torch.int32

    def made(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=kind, device="meta")

    states = batch + 2 if packed else batch
    tensors = {
        "query": made(*lead, heads, 64),
        "key": made(*lead, 2, 64),
        "value": made(*lead, 2, 64),
        "past_length": made(states, kind=count),
    }
    state = AttentionState.empty(states, 2, 64, rows, dtype, "meta", cache)
    state = dataclasses.replace(state, length=tensors["past_length"])
    tensors |= {f"past_{name}": tensor for name, tensor in state.tensors().items()}
    if packed:
        tensors |= {"query_start": made(batch + 1, kind=count), "state_row": made(batch, kind=count)}
    else:
        tensors["new_tokens"] = made(batch, kind=count)
    inputs = Inputs(*(tensors.get(n) for n in ("query", "key", "value", "new_tokens")))
    packing = Packing(tensors["query_start"], tensors["state_row"], tokens) if packed else None

    def run(output: torch.Tensor) -> None:
        launch.launch_attention(inputs, state, output, packing)

    variant = Variant(dtype=NAMES[dtype], head_dim=64, cache=cache, count_dtype="int32", packed=int(packed > 0))
    mirror(ATTENTION, tensors, run, variant, {CACHE.name: cache}, tokens if packed else 0)
