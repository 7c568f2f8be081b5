"""PyTorch's ops of chosen blocks on a GPU: kernels, and the forms in PyTorch where they do not cover the call."""

from __future__ import annotations

import pytest
import torch

from still_kernels.attention import AttentionState
from still_kernels.block_attention import Inputs
from still_kernels.block_attention import block_attention as naive_block_attention
from still_kernels.block_attention.dispatch import block_attention
from still_kernels.select_blocks import Inputs as SelectInputs
from still_kernels.select_blocks import naive_select_blocks
from still_kernels.select_blocks.dispatch import select_blocks
from tests.tolerances import REFERENCE


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [64, 1])
def test_kernels_and_forms(block_size: int) -> None:
    """A prompt of 700 tokens and a step; blocks of one token are covered by no kernel."""
    torch.manual_seed(0)
    choice = {"top_blocks": 6, "local_blocks": 2, "dense_length": 128, "block_slots": 6}
    rows = torch.zeros(2, 1, 2, 768, 64, device="cuda")
    state = AttentionState(rows[0], rows[1], torch.zeros(1, dtype=torch.int64, device="cuda"))
    sums = torch.zeros(1, 2, 48, 64, device="cuda")
    expected = (state, sums)
    for tokens in (700, 1):
        query, key, value = (torch.randn(1, tokens, n, 64, device="cuda") for n in (6, 2, 2))
        new = torch.full((1,), tokens, device="cuda")
        given = SelectInputs(query, key, new, state.length, **choice)
        blocks, sums = select_blocks(given, sums)
        naive, expected_sums = naive_select_blocks(given, expected[1])
        assert (blocks != naive).float().mean() < 1e-3 and torch.allclose(sums, expected_sums, atol=1e-4)
        chosen = naive if block_size == 64 else (64 * naive).clamp_min(-1)
        inputs = Inputs(query, key, value, new, chosen, block_size)
        output, state = block_attention(inputs, state)
        right, after = naive_block_attention(inputs, expected[0])
        assert (output - right).abs().max() <= REFERENCE[torch.float32] * right.abs().max()
        assert torch.equal(state.key, after.key) and torch.equal(state.length, after.length)
        expected = (after, expected_sums)
