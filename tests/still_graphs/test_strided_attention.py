"""still::StridedAttention, definition and function body, against a loop in float64."""

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
from tests.still_graphs.pieces import check_definition_and_body, drawn, pieces
from tests.still_kernels.attention.inputs import Layer
from tests.still_kernels.block_attention.inputs import SPLITS

LAYER, SIZE = Layer(), 7
SIZES = {"H": LAYER.heads, "HK": LAYER.kv_heads, "D": LAYER.dim}
BOUND, ROWS = 5e-6, 40


def looped(x: dict[str, Tensor], size: int) -> Tensor:
    """Outputs [T, H, D] of one sequence."""
    group, rows = LAYER.heads // LAYER.kv_heads, []
    for t in range(len(x["query"])):
        ends = [chunk * size + size - 1 for chunk in range(t // size)]
        for h in range(LAYER.heads):
            seen = [*ends, t]
            weights = (x["key"][seen, h // group] @ x["query"][t, h] / LAYER.dim**0.5).softmax(0)
            rows.append(weights @ x["value"][seen, h // group])
    return torch.stack(rows).view(-1, LAYER.heads, LAYER.dim)


def calls(dtype: torch.dtype = torch.float32, size: int = SIZE) -> Iterator[tuple[Inputs, Tensor, Tensor]]:
    """Calls of two sequences, lengths before them, outputs."""
    heads = {"query": LAYER.heads, "key": LAYER.kv_heads, "value": LAYER.kv_heads}
    x, counts = drawn(heads, LAYER.dim, SPLITS, dtype)
    expected = [looped({n: t[row].double() for n, t in x.items()}, size) for row in range(2)]
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


def test_what_does_not_fit_is_named() -> None:
    x, _, _ = next(calls())
    with pytest.raises(ShapeError, match="row_tokens=0 must be at least 1"):
        strided_attention(replace(x, row_tokens=0), empty())
    with pytest.raises(CapacityError, match="sequence 0 grows to 70 tokens; the state has 9 rows of 7"):
        strided_attention(x, empty(rows=9))
    with pytest.raises(UnsupportedError, match="row_tokens=0 must be at least 1"):
        node_model(STRIDED_ATTENTION, SIZES, torch.float32, row_tokens=0)
