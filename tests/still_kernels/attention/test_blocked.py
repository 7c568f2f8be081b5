"""The PyTorch form of softmax attention against the definition."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from still_graphs.errors import CapacityError, ShapeError
from still_kernels.attention.meaning import BLOCK, AttentionState, Inputs, blocked_attention
from tests.still_kernels.attention.inputs import SPLITS, Call, Layer, calls, quadratic
from tests.tolerances import REFERENCE


def run(call: Call, state: AttentionState, in_place: bool = False) -> tuple[torch.Tensor, AttentionState]:
    names = ("query", "key", "value", "new_tokens")
    return blocked_attention(Inputs(*(call.feeds[n] for n in names)), state, in_place)


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "apart"])
@pytest.mark.parametrize("layer", [Layer(), Layer(heads=2), Layer(heads=7, kv_heads=1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_equals_definition(layer: Layer, dtype: torch.dtype, in_place: bool) -> None:
    state = AttentionState.empty(2, layer.kv_heads, layer.dim, layer.rows, dtype)
    for call in calls(layer, SPLITS, dtype):
        before = state.key.clone()
        output, after = run(call, state, in_place)
        assert (after.key is state.key) == in_place and (in_place or torch.equal(state.key, before))
        assert float((output - call.output).abs().max()) <= REFERENCE[dtype]
        for name, tensor in after.tensors().items():
            assert torch.equal(tensor, call.state.tensors()[name]), name
        state = after


def test_blocks() -> None:
    """More tokens than a block, after a prompt that ends within one."""
    layer = Layer(rows=3 * BLOCK)
    state = AttentionState.empty(2, layer.kv_heads, layer.dim, layer.rows)
    for call in calls(layer, [BLOCK // 2, 2 * BLOCK + 3, [BLOCK // 3, 1]], torch.float32):
        output, state = run(call, state)
        assert float((output - call.output).abs().max()) <= REFERENCE[torch.float32]


def test_what_is_not_filled_is_not_read() -> None:
    layer = Layer()
    rubbish = torch.full((2, layer.kv_heads, layer.rows, layer.dim), torch.nan)
    state = AttentionState(rubbish, rubbish.clone(), torch.zeros(2, dtype=torch.int64))
    for call in calls(layer, SPLITS, torch.float32):
        output, state = run(call, state)
        assert float((output - call.output).abs().max()) <= REFERENCE[torch.float32]


def test_gradients_are_those_of_the_definition() -> None:
    layer = Layer()
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(2, 9, heads, layer.dim, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads in (layer.heads, layer.kv_heads, layer.kv_heads)
    ]
    weight = torch.randn(2, 9, layer.heads, layer.dim, generator=generator, dtype=torch.float64)
    expected = torch.autograd.grad((quadratic(*tensors) * weight).sum(), tensors)
    output, _ = blocked_attention(
        Inputs(*tensors), AttentionState.empty(2, layer.kv_heads, layer.dim, 9, torch.float64)
    )
    for found, wanted in zip(torch.autograd.grad((output * weight).sum(), tensors), expected, strict=True):
        assert torch.allclose(found, wanted, atol=REFERENCE[torch.float64])


def test_wrong_calls_are_refused() -> None:
    layer = Layer(rows=12)
    call = next(iter(calls(layer, [5], torch.float32)))
    state = AttentionState.empty(2, layer.kv_heads, layer.dim, 12)
    with pytest.raises(CapacityError, match="sequence 1 grows to 15 tokens"):
        run(call, AttentionState(state.key, state.value, torch.tensor([0, 10])))
    with pytest.raises(ShapeError, match="6 new tokens"):
        run(dataclasses.replace(call, feeds=call.feeds | {"new_tokens": torch.tensor([5, 6])}), state)
    with pytest.raises(ShapeError, match=r"state key: expected \[2, 2, 12, 10\]"):
        run(call, AttentionState.empty(1, layer.kv_heads, layer.dim, 12))
    with pytest.raises(ShapeError, match="no multiple"):
        Inputs(torch.zeros(1, 1, 5, 4), torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4)).check()
