"""Hybrid attention on an engine's pages on the CPU: requests come and go, pages are used again, nobody clears them."""

from __future__ import annotations

import math

import pytest
import torch

from still_graphs.errors import CapacityError, ShapeError
from still_kernels.hybrid_attention import (
    HybridAttentionConfig,
    HybridAttentionState,
    Inputs,
    chunked_hybrid_attention,
    paged,
)
from still_kernels.hybrid_attention.paged import hybrid_attention_paged
from still_kernels.packing import Packing

SIZES = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "chunk_size": 8, "salient_per_chunk": 2}


def pages(config: HybridAttentionConfig, count: int) -> dict[str, torch.Tensor]:
    """States of `count` pages one behind the other, all NaN, as an engine lays them out."""
    states = {n: t for n, t in HybridAttentionState.empty(config, 1).tensors().items() if n != "length"}
    size = sum(t.numel() for t in states.values()) + 16
    memory = torch.full((count * size,), float("nan"))
    found, offset = {}, 0
    for name, tensor in states.items():
        shape = tensor.shape[1:]
        found[name] = memory.as_strided((count, *shape), (size, *torch.empty(shape).stride()), offset)
        offset += math.prod(shape)
    return found


def random_inputs(config: HybridAttentionConfig, tokens: int) -> dict[str, torch.Tensor]:
    query, gate = (torch.randn(tokens, config.num_heads, config.head_dim) for _ in "qg")
    key, value = (torch.randn(tokens, config.num_kv_heads, config.head_dim) for _ in "kv")
    return {"query": query, "key": key, "value": value, "gate": gate.sigmoid()}


@pytest.mark.parametrize("overflow, capacity", [("error", 160), ("fold_min_score", 32), ("fold_oldest", 32)])
@pytest.mark.parametrize("scope", ["q_head", "kv_group_max"])
def test_requests_that_share_pages_equal_each_alone(overflow: str, capacity: int, scope: str) -> None:
    torch.manual_seed(0)
    config = HybridAttentionConfig(**SIZES, capacity_tokens=capacity, overflow=overflow, select_scope=scope)
    weights = [torch.randn(4, 8, 8) * 8**-0.5 for _ in "qk"]
    states = pages(config, 4)
    alone: dict[int, HybridAttentionState] = {}
    free, seen = [3, 1, 2, 0], {}
    generator = torch.Generator().manual_seed(1)
    for step in range(40):
        if len(seen) < 3 and step % 3 == 0:
            page = free.pop()
            seen[page], alone[page] = 0, HybridAttentionState.empty(config, 1)
        rows = sorted(seen, key=lambda page: (page * 7 + step) % 5)
        counts = [
            0 if step % 5 == 4 and i else int(torch.randint(1, 21, (), generator=generator)) for i in range(len(rows))
        ]
        counts = [n if step % 2 == 0 else min(n, 1) for n in counts]
        tokens = random_inputs(config, sum(counts) + 3)  # the last ones are padding
        start = torch.tensor([0, *counts]).cumsum(0).int()
        output = torch.full_like(tokens["query"], -7.0)
        length = torch.tensor([seen[page] for page in rows])
        hybrid_attention_paged(
            Inputs(**tokens, feature_q_weight=weights[0], feature_k_weight=weights[1]),
            config,
            HybridAttentionState(**states, length=length),
            Packing(start, torch.tensor(rows, dtype=torch.int32), max(counts)),
            output,
        )
        assert bool((output[int(start[-1]) :] == -7).all())
        for page, count, begin in zip(rows, counts, start.tolist(), strict=False):
            if count:
                own = {name: x[None, begin : begin + count] for name, x in tokens.items()}
                given = Inputs(**own, feature_q_weight=weights[0], feature_k_weight=weights[1])
                expected, alone[page] = chunked_hybrid_attention(given, config, alone[page])
                torch.testing.assert_close(output[begin : begin + count], expected[0], rtol=1e-5, atol=1e-6)
            seen[page] += count
            if seen[page] > 110:
                free.insert(0, page)
                del seen[page], alone[page]
    assert step == 39 and seen


def test_more_tokens_than_the_capacity_are_an_error() -> None:
    config = HybridAttentionConfig(**SIZES, capacity_tokens=24)
    tokens = random_inputs(config, 25)
    with pytest.raises(CapacityError, match="capacity_tokens=24"):
        hybrid_attention_paged(
            Inputs(**tokens, feature_q_weight=torch.zeros(1, 8, 8), feature_k_weight=torch.zeros(1, 8, 8)),
            config,
            HybridAttentionState(**pages(config, 1), length=torch.zeros(1, dtype=torch.int64)),
            Packing(torch.tensor([0, 25]), torch.tensor([0]), 25),
            torch.empty_like(tokens["query"]),
        )


def test_kernels_get_contiguous_heads_and_rows_of_one_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads are slices of one projection; what the kernels cannot address is refused, not read."""
    launch = pytest.importorskip("still_kernels.hybrid_attention.launch")
    seen: list[Inputs] = []
    monkeypatch.setattr(launch, "launch_hybrid_attention", lambda inputs, *_: seen.append(inputs))
    monkeypatch.setattr(paged, "demand_kernel", lambda *_: None)
    config = HybridAttentionConfig(**SIZES, capacity_tokens=64, gate="none")
    heads = torch.randn(5, 8 * 8).split([32, 16, 16], dim=-1)
    inputs = Inputs(*(x.unflatten(-1, (-1, 8)) for x in heads), None, torch.zeros(1, 8, 8), torch.zeros(1, 8, 8))
    packing = Packing(torch.tensor([0, 5]), torch.tensor([1]), 16, torch.tensor([64]))
    states, length = pages(config, 2), torch.zeros(1, dtype=torch.int64)
    paged._by_kernels(inputs, config, HybridAttentionState(**states, length=length), packing, torch.empty(5, 4, 8))
    assert all(x.is_contiguous() for x in (seen[0].query, seen[0].key, seen[0].value))
    assert torch.equal(seen[0].key, inputs.key)
    alone = {**states, "kv_state": states["kv_state"].contiguous()}
    with pytest.raises(ShapeError, match="expected one distance, that of pages"):
        paged._by_kernels(inputs, config, HybridAttentionState(**alone, length=length), packing, torch.empty(5, 4, 8))
    turned = {**states, "kv_state": states["kv_state"].transpose(2, 3)}
    with pytest.raises(ShapeError, match=r"state kv_state .* a row must be contiguous"):
        paged._by_kernels(inputs, config, HybridAttentionState(**turned, length=length), packing, torch.empty(5, 4, 8))
