"""still::ClusterTokens, definition and function body, against a loop."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from still_graphs.errors import CapacityError, ShapeError, UnsupportedError
from still_kernels.cluster_tokens.meaning import Inputs, cluster_tokens
from still_kernels.cluster_tokens.spec import CLUSTER_TOKENS
from tests.still_graphs.node_model import NodeOfStates, node_model
from tests.still_graphs.pieces import counts_of
from tests.still_kernels.block_attention.inputs import SPLITS

HEADS, CLUSTERS, ROWS = 3, 5, 300


def looped(cluster: Tensor, window: int) -> list[list[list[int]]]:
    """Positions of each token and head of one sequence [T, HK]."""
    return [
        [[s for s in range(t) if cluster[s, h] == cluster[t, h]][-window:] or [t] for h in range(HEADS)]
        for t in range(len(cluster))
    ]


def calls(window: int) -> Iterator[tuple[Inputs, list[list[list[list[int]]]]]]:
    """Calls of two sequences with a number of no cluster where there is no token, and what each token of theirs reads."""
    counts = counts_of(SPLITS)
    tokens = int(counts.sum(0).max())
    x = torch.randint(0, CLUSTERS, (2, tokens, HEADS), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    expected = [looped(x[row], window) for row in range(2)]
    past = torch.zeros(2, dtype=torch.int64)
    for new in counts:
        fed = torch.full((2, max(int(new.max()), 1), HEADS), 1 << 20, dtype=torch.int32)
        ends = [(int(past[row]), int(past[row]) + int(new[row])) for row in range(2)]
        for row, (begin, end) in enumerate(ends):
            fed[row, : end - begin] = x[row, begin:end]
        yield Inputs(fed, new, past, window), [expected[row][begin:end] for row, (begin, end) in enumerate(ends)]
        past = past + new


@pytest.mark.parametrize("window", [1, 7, 400])
def test_definition_and_body_equal_the_loop(window: int) -> None:
    model = node_model(
        CLUSTER_TOKENS, {"HK": HEADS, "N": ROWS, "cluster_window": window}, torch.float32, cluster_window=window
    )
    state = torch.zeros(2, HEADS, ROWS)
    nodes = [NodeOfStates(model, {"clusters": state}, in_place, "blocks") for in_place in (True, False)]
    for inputs, expected in calls(window):
        blocks, state = cluster_tokens(inputs, state)
        feeds = {n: t for n, t in vars(inputs).items() if isinstance(t, Tensor)}
        for node in nodes:
            assert torch.equal(node(feeds, torch.zeros_like(blocks)), blocks)
            assert torch.equal(node.states()["clusters"], state)
        for row, of_row in enumerate(expected):
            assert bool((blocks[row, len(of_row) :] == -1).all())
            for t, of_token in enumerate(of_row):
                assert [[s for s in slots if s >= 0] for slots in blocks[row, t].tolist()] == of_token


def test_what_does_not_fit_is_named() -> None:
    x, _ = next(calls(7))
    with pytest.raises(ShapeError, match="cluster_window=0 must be at least 1"):
        cluster_tokens(replace(x, cluster_window=0), torch.zeros(2, HEADS, ROWS))
    with pytest.raises(CapacityError, match="sequence 0 grows to 70 tokens; the state has room for 64"):
        cluster_tokens(x, torch.zeros(2, HEADS, 64))
    with pytest.raises(UnsupportedError, match="cluster_window=0 must be at least 1"):
        node_model(CLUSTER_TOKENS, {"HK": HEADS, "N": ROWS, "cluster_window": 0}, torch.float32, cluster_window=0)
