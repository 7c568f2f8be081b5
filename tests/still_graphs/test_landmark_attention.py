"""still::LandmarkAttention, definition and function body, against a loop in float64; faults that must be seen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from still_graphs.errors import ShapeError, UnsupportedError
from still_kernels.attention.meaning import AttentionState
from still_kernels.landmark_attention.meaning import Inputs, landmark_attention
from still_kernels.landmark_attention.spec import LANDMARK_ATTENTION
from tests.attention_cases import Layer
from tests.block_cases import SPLITS
from tests.linear_attention_cases import error
from tests.still_graphs.node_model import NodeOfStates, node_model

LAYER, SIZE = Layer(), 51
SIZES = {"H": LAYER.heads, "HK": LAYER.kv_heads, "D": LAYER.dim}
BOUND, ROWS = 5e-6, 300


def looped(x: dict[str, Tensor], size: int, fault: str = "") -> Tensor:
    """Outputs [T, H, D] of one sequence, as two softmaxes. `fault`: "itself", a landmark sees itself; "flat", a block's tokens are not
    shared out among them."""
    group, rows = LAYER.heads // LAYER.kv_heads, []
    for t in range(len(x["query"])):
        block = t // size
        own = [s for s in range(block * size, t + 1) if s % size != size - 1 or (fault == "itself" and s == t)]
        for h in range(LAYER.heads):
            key, value = x["key"][:, h // group], x["value"][:, h // group]
            scores = key @ x["query"][t, h] / LAYER.dim**0.5
            gates = [b * size + size - 1 for b in range(block)]
            shares = torch.cat((scores[own], scores[gates])).softmax(0)
            output = shares[: len(own)] @ value[own]
            for b, share in enumerate(shares[len(own) :]):
                inside = slice(b * size, b * size + size - 1)
                weights = (
                    torch.full((size - 1,), 1 / (size - 1)).double() if fault == "flat" else scores[inside].softmax(0)
                )
                output = output + share * (weights @ value[inside])
            rows.append(output)
    return torch.stack(rows).view(-1, LAYER.heads, LAYER.dim)


def calls(
    dtype: torch.dtype = torch.float32, size: int = SIZE, fault: str = ""
) -> Iterator[tuple[Inputs, Tensor, Tensor]]:
    """Calls of two sequences with NaN where there is no token, lengths before them, outputs."""
    counts = torch.tensor([s if isinstance(s, list) else [s] * 2 for s in SPLITS])
    generator, tokens = torch.Generator().manual_seed(0), int(counts.sum(0).max())
    heads = {"query": LAYER.heads, "key": LAYER.kv_heads, "value": LAYER.kv_heads}
    x = {n: torch.randn(2, tokens, h, LAYER.dim, generator=generator).to(dtype) for n, h in heads.items()}
    expected = [looped({n: t[row].double() for n, t in x.items()}, size, fault) for row in range(2)]
    past = torch.zeros(2, dtype=torch.int64)
    for new in counts:
        longest = max(int(new.max()), 1)
        feeds = {name: torch.full((2, longest, *t.shape[2:]), torch.nan, dtype=dtype) for name, t in x.items()}
        output = torch.zeros(2, longest, LAYER.heads, LAYER.dim, dtype=torch.float64)
        for row, count in enumerate(new.tolist()):
            place = slice(int(past[row]), int(past[row]) + count)
            for name, t in x.items():
                feeds[name][row, :count] = t[row, place]
            output[row, :count] = expected[row][place]
        yield Inputs(**feeds, new_tokens=new, block_tokens=size), past, output
        past = past + new


def empty(dtype: torch.dtype = torch.float32) -> AttentionState:
    return AttentionState.empty(2, LAYER.kv_heads, LAYER.dim, ROWS, dtype)


@pytest.mark.parametrize("dtype, bound", [(torch.float32, BOUND), (torch.float16, 1e-3)], ids=str)
@pytest.mark.parametrize("size", [2, SIZE])
def test_definition_and_body_equal_the_loop(dtype: torch.dtype, bound: float, size: int) -> None:
    model = node_model(LANDMARK_ATTENTION, SIZES, dtype, block_tokens=size)
    start, state, worst = empty(dtype), empty(dtype), 0.0
    nodes = [NodeOfStates(model, {"key": start.key, "value": start.value}, in_place) for in_place in (True, False)]
    for inputs, past, output in calls(dtype, size):
        found, state = landmark_attention(inputs, state)
        feeds = {n: t for n, t in vars(inputs).items() if isinstance(t, Tensor)} | {"past_length": past}
        made = [node(feeds, output.to(dtype)) for node in nodes]
        worst = max(worst, *(error(x, output) for x in (found, *made)))
        for node in nodes:
            kept = node.states()
            assert torch.equal(kept["key"], state.key) and torch.equal(kept["value"], state.value)
    print(dtype, size, worst)
    assert worst <= bound


@pytest.mark.parametrize("fault", ["itself", "flat"])
def test_faults_are_seen(fault: str) -> None:
    """Beyond a thousand times the bound."""
    state, worst = empty(), 0.0
    for inputs, _, wrong in calls(fault=fault):
        found, state = landmark_attention(inputs, state)
        worst = max(worst, error(found, wrong))
    assert worst > 1e3 * BOUND


def test_what_does_not_fit_is_named() -> None:
    x, _, _ = next(calls())
    with pytest.raises(ShapeError, match="block_tokens=1 must be at least 2"):
        landmark_attention(replace(x, block_tokens=1), empty())
    with pytest.raises(UnsupportedError, match="block_tokens=1 must be at least 2"):
        node_model(LANDMARK_ATTENTION, SIZES, torch.float32, block_tokens=1)
