"""Choices of blocks that nearly tie: told by margins of PyTorch's two runs, where these followed a runtime."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from still_kernels.registry import ties_of
from still_kernels.select_blocks.meaning import Inputs, naive_select_blocks
from still_kernels.select_blocks.ties import BlockTies
from tests.still_kernels.block_attention.inputs import Layer

LAYER = Layer()
HEADS, COUNTS = LAYER.kv_heads, np.array([120, 130])
TOKEN = 82
"""Whose choice for head 1 of sequence 1 is a clear one."""
TIES = BlockTies(HEADS)


def call(noise: float = 0.0, told: torch.Tensor | None = None, dtype: torch.dtype = torch.float64) -> Any:
    """Blocks and margins of sequences of 120 and 130 tokens; noise in the queries of token TOKEN of sequence 1."""
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, 130, n, LAYER.dim, generator=generator).double() for n in (LAYER.heads, HEADS))
    query[1, TOKEN] += noise * torch.randn(query.shape[2:], generator=generator).double()
    state = torch.zeros(2, HEADS, -(-LAYER.rows // 3), LAYER.dim, dtype=torch.promote_types(dtype, torch.float32))
    given = Inputs(query.to(dtype), key.to(dtype), torch.from_numpy(COUNTS), torch.zeros(2).long(), **LAYER.attributes)
    seen: list[torch.Tensor] = []

    def watch(margins: torch.Tensor) -> torch.Tensor | None:
        seen.append(margins)
        return told

    return naive_select_blocks(given, state, watch)[0], seen[0]


def leads(noise: float, went: torch.Tensor | None = None) -> np.ndarray:
    """Of the reference beside a run with noise, where both read the blocks `went`, [B, N * HK]; calls bring 60 tokens and the rest."""

    def scores(margins: torch.Tensor) -> Any:
        read = margins > 0 if went is None else went
        told = torch.cat([margins, read.to(margins.dtype)], dim=2).float().numpy()
        lengths = [np.array([0, 0]), np.array([60, 60]), COUNTS]
        parts = []
        for begin, end in itertools.pairwise(lengths):
            blocks = -(-int(end.max()) // 12) * HEADS  # an earlier call has fewer
            part = told[:, begin[1] : end[1], :, :blocks]
            parts.append((begin, {"present_length": end, "present_margins.4": part}))
        return TIES.scores(parts)

    return TIES.leads(scores(call()[1]), scores(call(noise)[1]), COUNTS)[~4]


def exchanged(forced: bool = False) -> torch.Tensor:
    """Token TOKEN of sequence 1 reads the next block of head 1 in the place of the last, or of one that is always read."""
    margins = call()[1]
    at = margins[1, TOKEN, 0, 1::HEADS]
    went = margins > 0
    last = 0 if forced else int(at.where(at > 0, torch.inf).argmin())
    went[1, TOKEN, 0, HEADS * last + 1] = False
    went[1, TOKEN, 0, HEADS * int(at.where(at <= 0, -torch.inf).argmax()) + 1] = True
    return went


def test_margins_say_what_is_chosen() -> None:
    blocks, margins = call()
    read = torch.zeros(2, 130, HEADS, 12, dtype=torch.bool).scatter_(-1, blocks.long() % 12, blocks >= 0)[..., :11]
    assert torch.equal((margins > 0)[:, :, 0].unflatten(-1, (11, HEADS)).transpose(2, 3), read)
    sparse = margins[0, 100, 0].unflatten(0, (11, HEADS))
    assert sparse.isfinite().any() and (sparse[0] == torch.inf).all() and (sparse[9:] == -torch.inf).all()
    assert margins[0, 40].isinf().all(), "few tokens read all blocks"


def test_a_definition_reads_what_it_is_told() -> None:
    own, margins = call()
    went = exchanged()[:, :, 0]
    places = torch.where(went, torch.arange(22), 99).sort(-1).values[..., :14]
    places[0] = 99
    found, _ = call(told=torch.where(places < 22, places, -1))
    assert torch.equal(found[0], own[0]) and not torch.equal(found[1, TOKEN, 1], own[1, TOKEN, 1])
    found[1, TOKEN, 1] = own[1, TOKEN, 1]
    assert torch.equal(found, own)
    assert (margins > 0).sum(-1).max() <= 14


@pytest.mark.parametrize("noise, wrong", [(1e-7, 1), (0.3, 0)])
def test_a_runtime_that_is_followed(noise: float, wrong: int) -> None:
    found = leads(noise, exchanged())
    chosen = TIES.compare([], {~4: found})
    assert (chosen.wrong, chosen.near_ties) == (wrong, 1 - wrong)
    assert chosen.compared > 150 and chosen.widest == -found[1, HEADS * TOKEN + 1]
    assert (np.delete(found.ravel(), 260 + HEADS * TOKEN + 1) >= 0).all()


@pytest.mark.parametrize("kind", ["more", "fewer", "forced"])
def test_other_numbers_of_blocks_are_no_ties(kind: str) -> None:
    went = exchanged(kind == "forced")
    if kind != "forced":
        went = call()[1] > 0 if kind == "fewer" else went | (call()[1] > 0)
        margins = call()[1][1, TOKEN, 0]
        if kind == "fewer":
            went[1, TOKEN, 0, int(margins.where(margins > 0, torch.inf).argmin())] = False
    chosen = TIES.compare([], {~4: leads(0.3, went)})
    assert (chosen.wrong, chosen.near_ties) == (1, 0)


def test_without_another_choice() -> None:
    found = leads(1e-7)
    assert found.min() >= 0 and TIES.compare([], {~4: found}).near_ties == 0
    assert np.isinf(found[0, 240:]).all(), "padding"
    manifest: Any = {"ops": {"SelectBlocks": 1}, "model": {"kv_heads": 2}}
    assert [op.watched for op in ties_of(manifest).each] == ["SelectBlocks"]
    assert [op.watched for op in ties_of({**manifest, "ops": {"SelectBlocks": 1, "Route": 1}}).each] == ["Route"]
