"""still::KeptAttention, definition and function body, against a loop in float64."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from still_graphs.errors import CapacityError, ShapeError, UnsupportedError
from still_kernels.kept_attention.meaning import Inputs, KeptState, kept_attention
from still_kernels.kept_attention.spec import KEPT_ATTENTION
from tests.still_graphs.node_model import node_model
from tests.still_graphs.pieces import check_definition_and_body, counts_of, pieces
from tests.still_kernels.linear_attention.inputs import BOUND, SPLITS

SIZES = {"H": 12, "HK": 6, "D": 10, "R": 3}
SIZE = 16


def looped(x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Outputs [T, H, D] of one sequence, and of each token how many chunks each route keeps after it, [T, R]."""
    told = x["keep"][SIZE - 1 :: SIZE] > 0  # [chunks, R]
    place = torch.arange(len(x["query"]))
    chunk, rows = place // SIZE, []
    behind = torch.cat((told, torch.zeros(1, SIZES["R"], dtype=torch.bool)))[chunk]  # the open chunk is nobody's past
    for head in range(SIZES["H"]):
        own = head * SIZES["HK"] // SIZES["H"]
        mask = (chunk == chunk[:, None]) | behind[:, own * SIZES["R"] // SIZES["HK"]]
        scores = x["query"][:, head] @ x["key"][:, own].T / SIZES["D"] ** 0.5
        weights = scores.masked_fill(~(mask & (place <= place[:, None])), -torch.inf).softmax(1)
        rows.append(weights @ x["value"][:, own])
    counts = [told[: (t + 1) // SIZE].sum(0) for t in range(len(place))]
    return torch.stack(rows, 1), torch.stack(counts)


def drawn(dtype: torch.dtype = torch.float32) -> tuple[dict[str, Tensor], Tensor]:
    """Tensors of two sequences, and tokens by call, [calls, 2]."""
    counts = counts_of(SPLITS)
    generator, tokens = torch.Generator().manual_seed(0), int(counts.sum(0).max())
    heads = {"query": SIZES["H"], "key": SIZES["HK"], "value": SIZES["HK"]}
    x = {
        name: torch.randn(2, tokens, n, SIZES["D"], generator=generator, dtype=torch.float64).to(dtype)
        for name, n in heads.items()
    }
    x["keep"] = (torch.randn(2, tokens, SIZES["R"], generator=generator) > 0).int()
    return x, counts


def calls(dtype: torch.dtype = torch.float32) -> Iterator[tuple[Inputs, Tensor, Tensor, Tensor]]:
    """Calls of two sequences, lengths before them, outputs, and chunks that are kept then."""
    x, counts = drawn(dtype)
    made = [looped({n: t[row].double() for n, t in x.items()}) for row in range(2)]
    for feeds, past, output in pieces(x, [outputs for outputs, _ in made], counts):
        after = past + feeds["new_tokens"]
        kept = [counted[end - 1] if end else counted[0] * 0 for (_, counted), end in zip(made, after, strict=True)]
        yield Inputs(**feeds, past_length=past, chunk_size=SIZE), past, output, torch.stack(kept).float()


def empty(rows: int, dtype: torch.dtype = torch.float32) -> KeptState:
    key = torch.zeros(2, SIZES["HK"], rows, SIZES["D"], dtype=dtype)
    return KeptState(key, key.clone(), torch.zeros(2, SIZES["R"]))


def rows_needed() -> int:
    """The most rows that a call of `calls` needs: fewer than there are tokens."""
    least, kept = 0, torch.zeros(2, SIZES["R"])
    for inputs, *_, after in calls():
        assert inputs.past_length is not None and inputs.new_tokens is not None
        held = SIZE * kept.max(1).values + inputs.past_length % SIZE + inputs.new_tokens
        least, kept = max(least, int(held.max())), after
    return least


@pytest.mark.parametrize("dtype, bound", [(torch.float32, BOUND), (torch.float16, 1e-3)], ids=str)
def test_definition_and_body_equal_the_loop(dtype: torch.dtype, bound: float) -> None:
    """With the rows that they need and no more."""
    rows = rows_needed()
    assert rows < drawn()[1].sum(0).max()
    model = node_model(KEPT_ATTENTION, SIZES | {"N": rows}, dtype, chunk_size=SIZE)
    names, state = KeptState._fields, empty(rows, dtype)
    check_definition_and_body(kept_attention, model, state, names, calls(dtype), bound)
    for inputs, *_, kept in calls(dtype):
        _, state = kept_attention(inputs, state)
        assert torch.equal(state.kept_chunks, kept)


def test_in_place_equals_apart() -> None:
    rows = rows_needed()
    apart, own = empty(rows), empty(rows)
    for inputs, *_ in calls():
        before = [x.clone() for x in apart]
        found, after = kept_attention(inputs, apart)
        assert all(torch.equal(x, y) for x, y in zip(before, apart, strict=True))
        same, kept = kept_attention(inputs, own, in_place=True)
        assert kept.key is own.key and torch.equal(found, same)
        assert all(torch.equal(x, y) for x, y in zip(after, kept, strict=True))
        apart, own = after, kept


def test_what_does_not_fit_is_named() -> None:
    x, *_ = next(calls())
    assert x.keep is not None
    four = x.keep.new_zeros(*x.keep.shape[:2], 4)
    with pytest.raises(ShapeError, match="4 routes, which do not divide the 6 heads"):
        kept_attention(replace(x, keep=four), empty(99)._replace(kept_chunks=torch.zeros(2, 4)))
    with pytest.raises(ShapeError, match="chunk_size=0"):
        kept_attention(replace(x, chunk_size=0), empty(99))
    with pytest.raises(CapacityError, match="sequence 0 keeps 0 tokens and brings 70; the state has room for 69"):
        kept_attention(x, empty(69))
    with pytest.raises(UnsupportedError, match="4 routes must divide the 6 heads"):
        node_model(KEPT_ATTENTION, SIZES | {"R": 4, "N": 99}, torch.float32)
