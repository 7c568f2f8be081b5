"""The core launches of still::SelectBlocks and still::BlockAttention what the Python launcher launches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from still_kernels.attention.meaning import AttentionState
from still_kernels.block_attention.meaning import Inputs
from still_kernels.block_attention.plan import Variant
from still_kernels.block_attention.spec import BLOCK_ATTENTION
from still_kernels.select_blocks.meaning import Inputs as SelectInputs
from still_kernels.select_blocks.plan import Variant as SelectVariant
from still_kernels.select_blocks.spec import SELECT_BLOCKS
from tests.plugins.test_launches import NAMES, fake_compiler, mirror  # noqa: F401  # fixtures

attends = pytest.importorskip("still_kernels.block_attention.call")
selects = pytest.importorskip("still_kernels.select_blocks.call")
CASES = [
    # batch, tokens, heads, rows of the cache, dtype
    (1, 1, 32, 262144, torch.float16),
    (3, 8, 6, 16384, torch.bfloat16),
    (2, 9, 4, 16384, torch.float32),
    (1, 5000, 32, 16384, torch.float16),
]


def made(*shape: int, kind: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=kind, device="meta")


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_the_core_mirrors_the_choice(case: tuple[int, int, int, int, torch.dtype], mirror: Callable[..., None]) -> None:  # noqa: F811
    batch, tokens, heads, rows, dtype = case
    new, past = (made(batch, kind=torch.int32) for _ in range(2))
    query, key = (made(batch, tokens, n, 128, kind=dtype) for n in (heads, 2))
    inputs = SelectInputs(query, key, new, past)
    sums = made(batch, 2, rows // 16, 128, kind=torch.float32)
    attributes = {a.name: a.default for a in SELECT_BLOCKS.attributes}
    tensors = {"query": query, "key": key, "new_tokens": new, "past_length": past, "past_key_sum": sums}
    variant = SelectVariant(NAMES[dtype], group=1 << (heads // 2 - 1).bit_length(), count_dtype="int32")
    blocks = {"blocks": made(batch, tokens, 2, 128, kind=torch.int32)}

    def run(blocks: torch.Tensor) -> None:
        selects.launch_select_blocks(inputs, sums, blocks)

    mirror(SELECT_BLOCKS, tensors, run, variant, attributes, blocks)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_the_core_mirrors_attention(case: tuple[int, int, int, int, torch.dtype], mirror: Callable[..., None]) -> None:  # noqa: F811
    batch, tokens, heads, rows, dtype = case
    new, past = (made(batch, kind=torch.int32) for _ in range(2))
    query, key, value = (made(batch, tokens, n, 128, kind=dtype) for n in (heads, 2, 2))
    blocks = made(batch, tokens, 2, 128, kind=torch.int32)
    caches = [made(batch, 2, rows, 128, kind=dtype) for _ in "kv"]
    state = AttentionState(caches[0], caches[1], past)
    inputs = Inputs(query, key, value, new, blocks, 64)
    tensors = {"query": query, "key": key, "value": value, "blocks": blocks, "new_tokens": new, "past_length": past}
    tensors |= {"past_key": caches[0], "past_value": caches[1]}
    variant = Variant(NAMES[dtype], count_dtype="int32")
    mirror(
        BLOCK_ATTENTION,
        tensors,
        lambda output: attends.launch_block_attention(inputs, state, output),
        variant,
        {"block_size": 64},
    )
