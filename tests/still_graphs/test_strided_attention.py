"""still::StridedAttention, definition and function body, against a loop in float64; faults that must be seen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from still_graphs.errors import CapacityError, ShapeError, UnsupportedError
from still_kernels.attention.meaning import AttentionState
from still_kernels.strided_attention.meaning import Inputs, strided_attention
from still_kernels.strided_attention.spec import STRIDED_ATTENTION
from tests.still_graphs.node_model import node_model
from tests.still_graphs.pieces import check_definition_and_body, counts_of, pieces
from tests.still_kernels.attention.inputs import Layer
from tests.still_kernels.block_attention.inputs import SPLITS
from tests.still_kernels.linear_attention.inputs import error

LAYER, SIZE = Layer(), 7
SIZES = {"H": LAYER.heads, "HK": LAYER.kv_heads, "D": LAYER.dim}
BOUND, ROWS = 5e-6, 40


def looped(x: dict[str, Tensor], size: int, written: str = "") -> Tensor:
    """Outputs [T, H, D] of one sequence. `written`: "first", a row keeps its chunk's first token; "early", its own chunk sees it."""
    group, rows = LAYER.heads // LAYER.kv_heads, []
    for t in range(len(x["query"])):
        ends = [chunk * size + (0 if written == "first" else size - 1) for chunk in range(t // size)]
        ends += [t // size * size] if written == "early" else []
        for h in range(LAYER.heads):
            seen = [*ends, t]
            weights = (x["key"][seen, h // group] @ x["query"][t, h] / LAYER.dim**0.5).softmax(0)
            rows.append(weights @ x["value"][seen, h // group])
    return torch.stack(rows).view(-1, LAYER.heads, LAYER.dim)


def calls(
    dtype: torch.dtype = torch.float32, size: int = SIZE, **fault: str
) -> Iterator[tuple[Inputs, Tensor, Tensor]]:
    """Calls of two sequences, lengths before them, outputs."""
    counts = counts_of(SPLITS)
    generator, tokens = torch.Generator().manual_seed(0), int(counts.sum(0).max())
    heads = {"query": LAYER.heads, "key": LAYER.kv_heads, "value": LAYER.kv_heads}
    x = {n: torch.randn(2, tokens, h, LAYER.dim, generator=generator).to(dtype) for n, h in heads.items()}
    expected = [looped({n: t[row].double() for n, t in x.items()}, size, **fault) for row in range(2)]
    for feeds, past, output in pieces(x, expected, counts):
        yield Inputs(**feeds, row_tokens=size), past, output


def empty(dtype: torch.dtype = torch.float32, rows: int = ROWS) -> AttentionState:
    return AttentionState.empty(2, LAYER.kv_heads, LAYER.dim, rows, dtype)


@pytest.mark.parametrize("dtype, bound", [(torch.float32, BOUND), (torch.float16, 1e-3)], ids=str)
@pytest.mark.parametrize("size", [1, SIZE, 64])
def test_definition_and_body_equal_the_loop(dtype: torch.dtype, bound: float, size: int) -> None:
    rows = -(-280 // size)
    model = node_model(STRIDED_ATTENTION, SIZES, dtype, row_tokens=size)
    check_definition_and_body(strided_attention, model, empty(dtype, rows), ("key", "value"), calls(dtype, size), bound)


def test_faults_are_seen() -> None:
    """Each beyond a thousand times the bound."""
    *_, (x, _, output) = (call for call in calls() if call[0].query.shape[1] == 129)
    state = empty()
    for inputs, _, _ in calls():
        if inputs.query.shape[1] == 129:
            break
        _, state = strided_attention(inputs, state)
    found, _ = strided_attention(x, state)
    assert error(found, output) <= BOUND
    for fault in ("first", "early"):
        wrong = next(call[2] for call in calls(written=fault) if call[0].query.shape[1] == 129)
        assert error(found, wrong) > 1e3 * BOUND, fault
    stale = replace(state, key=state.key.roll(1, 2))
    assert error(strided_attention(x, stale)[0], output) > 1e3 * BOUND
    assert error(strided_attention(replace(x, row_tokens=SIZE + 1), state)[0], output) > 1e3 * BOUND


def test_what_does_not_fit_is_named() -> None:
    x, _, _ = next(calls())
    with pytest.raises(ShapeError, match="row_tokens=0 must be at least 1"):
        strided_attention(replace(x, row_tokens=0), empty())
    with pytest.raises(CapacityError, match="sequence 0 grows to 70 tokens; the state has 9 rows of 7"):
        strided_attention(x, empty(rows=9))
    with pytest.raises(UnsupportedError, match="row_tokens=0 must be at least 1"):
        node_model(STRIDED_ATTENTION, SIZES, torch.float32, row_tokens=0)
