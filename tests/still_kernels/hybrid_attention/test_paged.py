"""Hybrid attention on an engine's pages on the CPU: requests come and go, pages are used again, nobody clears them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from still_graphs.errors import CapacityError, ShapeError
from still_kernels.codes import rounded
from still_kernels.hybrid_attention import paged
from still_kernels.hybrid_attention.config import HybridAttentionConfig
from still_kernels.hybrid_attention.meaning.chunked import chunked_hybrid_attention
from still_kernels.hybrid_attention.meaning.inputs import Inputs
from still_kernels.hybrid_attention.meaning.state import HybridAttentionState
from still_kernels.hybrid_attention.paged import hybrid_attention_paged
from still_kernels.hybrid_attention.pages import Pages
from still_kernels.hybrid_attention.plan import BY_TMA, plan_constants
from still_kernels.hybrid_attention.plan.tiles import MANY_HEADS, for_many_rows, tile_table
from still_kernels.packing import Packing, PagedStates
from still_kernels.tile import changed
from tests.tolerances import NARROW_NORM

SIZES = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "chunk_size": 8, "salient_per_chunk": 2}


def some_pages(config: HybridAttentionConfig, rows: int = 8, linear: torch.dtype = torch.float32) -> Pages:
    """Pages of few salient rows, so that a request has several, and of three heads of S."""
    found = Pages.of(config, config.capacity_slots, torch.float32, linear)
    states = []
    for name, shape, dtype, offset in found.states:
        if name in paged.LINEAR:
            shape = (3, *shape[1:])
        elif name in paged.GROWING:
            shape = (shape[0], rows, *shape[2:])
        states.append((name, shape, dtype, offset))
    return dataclasses.replace(found, heads=3, rows=rows, states=tuple(states))


def memory_of(pages: Pages, count: int) -> torch.Tensor:
    """`count` pages, all NaN."""
    return torch.full((count, pages.size_bytes // 4), float("nan")).view(torch.int8)


def random_inputs(config: HybridAttentionConfig, tokens: int) -> dict[str, torch.Tensor]:
    query, gate = (torch.randn(tokens, config.num_heads, config.head_dim) for _ in "qg")
    key, value = (torch.randn(tokens, config.num_kv_heads, config.head_dim) for _ in "kv")
    if config.cache == "int8":
        key, value = rounded(key), rounded(value)
    return {"query": query, "key": key, "value": value, "gate": gate.sigmoid()}


CACHES = pytest.mark.parametrize("cache", [None, "int8"])


@CACHES
@pytest.mark.parametrize("overflow, capacity", [("error", 160), ("fold_oldest", 32)])
@pytest.mark.parametrize("scope", ["q_head", "kv_group_max"])
def test_requests_that_share_pages_equal_each_alone(
    overflow: str, capacity: int, scope: str, cache: str | None
) -> None:
    torch.manual_seed(0)
    config = HybridAttentionConfig(
        **SIZES, capacity_tokens=capacity, overflow=overflow, select_scope=scope, cache=cache
    )
    weights = [torch.randn(4, 8, 8) * 8**-0.5 for _ in "qk"]
    pages = some_pages(config)
    memory = memory_of(pages, 3 * pages.columns + 1)
    alone: dict[int, HybridAttentionState] = {}
    free, owned, seen = list(range(3 * pages.columns, 0, -1)), {}, {}  # page 0 is nobody's
    generator = torch.Generator().manual_seed(1)
    most = 0
    for step in range(40):
        if len(seen) < 3 and step % 3 == 0:
            seen[step], owned[step], alone[step] = 0, [], HybridAttentionState.empty(config, 1)
        rows = sorted(seen, key=lambda request: (request * 7 + step) % 5)
        counts = [
            0 if step % 5 == 4 and i else int(torch.randint(1, 21, (), generator=generator)) for i in range(len(rows))
        ]
        counts = [n if step % 2 == 0 else min(n, 1) for n in counts]
        table = torch.zeros(len(rows), pages.columns, dtype=torch.int32)
        for i, (request, count) in enumerate(zip(rows, counts, strict=True)):
            while len(owned[request]) < pages.after(seen[request] + count):
                owned[request].append(free.pop(int(torch.randint(len(free), (), generator=generator))))
            table[i, : len(owned[request])] = torch.tensor(owned[request], dtype=torch.int32)
        most = max(most, len(set(table.flatten().tolist())))
        tokens = random_inputs(config, sum(counts) + 3)  # the last ones are padding
        start = torch.tensor([0, *counts]).cumsum(0).int()
        output = torch.full_like(tokens["query"], -7.0)
        hybrid_attention_paged(
            Inputs(**tokens, feature_q_weight=weights[0], feature_k_weight=weights[1]),
            config,
            PagedStates(
                memory,
                torch.tensor([seen[request] for request in rows]),
                Packing(start, table, max(counts), pages),
            ),
            output,
        )
        assert bool((output[int(start[-1]) :] == -7).all())
        assert bool(memory[0].view(torch.float32).isnan().all()), "the page that is nobody's was written"
        for request, count, begin in zip(rows, counts, start.tolist(), strict=False):
            if count:
                own = {name: x[None, begin : begin + count] for name, x in tokens.items()}
                given = Inputs(**own, feature_q_weight=weights[0], feature_k_weight=weights[1])
                expected, alone[request] = chunked_hybrid_attention(given, config, alone[request])
                torch.testing.assert_close(output[begin : begin + count], expected[0], rtol=1e-5, atol=1e-6)
            seen[request] += count
            if seen[request] > 110:
                free = owned.pop(request) + free
                del seen[request], alone[request]
    assert step == 39 and seen and most > 3 * pages.after(1)


@CACHES
@pytest.mark.parametrize("overflow, capacity", [("error", 160), ("fold_oldest", 32)])
@pytest.mark.parametrize("linear", [torch.float32, torch.bfloat16])
def test_a_kept_prefix_is_gone_on_from_again_and_again(
    overflow: str, capacity: int, linear: torch.dtype, cache: str | None
) -> None:
    """Copies of the pages that change, the others shared: whoever goes on from them gets what it gets alone, and nobody changes them."""
    torch.manual_seed(0)
    config = HybridAttentionConfig(**SIZES, capacity_tokens=capacity, overflow=overflow, cache=cache)
    weights = [torch.randn(4, 8, 8) * 8**-0.5 for _ in "qk"]
    pages = some_pages(config, linear=linear)
    for tokens in (1, 15, 16, 64, 71, 96):
        memory, free = memory_of(pages, 5 * pages.columns + 1), list(range(1, 5 * pages.columns + 1))
        prefix = random_inputs(config, tokens)

        def run(
            table: list[int], given: dict[str, torch.Tensor], seen: int, memory: torch.Tensor = memory
        ) -> torch.Tensor:
            count = len(given["query"])
            packing = Packing(torch.tensor([0, count]).int(), torch.tensor([table]).int(), max(count, 16), pages)
            output = torch.empty_like(given["query"])
            length = torch.tensor([seen], dtype=torch.int32)
            hybrid_attention_paged(
                Inputs(**given, feature_q_weight=weights[0], feature_k_weight=weights[1]),
                config,
                PagedStates(memory, length, packing),
                output,
            )
            return output

        def table_of(first: list[int], free: list[int] = free) -> list[int]:
            return [*first, *(free.pop() for _ in range(pages.columns - len(first)))]

        own = table_of([])
        run(own, prefix, 0)
        kept = own[: pages.after(tokens)]
        for column in pages.changing(tokens):
            kept[column] = free.pop()
            memory[kept[column]] = memory[own[column]]
        before = memory[kept].clone()
        for other in range(3):
            table = own
            if other:
                table = table_of(kept)
                for column in pages.changing(tokens):
                    table[column] = free.pop()
                    memory[table[column]] = memory[kept[column]]
            more = random_inputs(config, 50)
            found = run(table, more, tokens)
            fresh = memory_of(pages, pages.columns)
            run(list(range(pages.columns)), prefix, 0, fresh)
            torch.testing.assert_close(found, run(list(range(pages.columns)), more, tokens, fresh))
            assert torch.equal(memory[kept].view(torch.int32), before.view(torch.int32))
    if overflow == "error":
        assert len(pages.changing(96)) < pages.after(96)


def test_more_tokens_than_the_capacity_are_an_error() -> None:
    config = HybridAttentionConfig(**SIZES, capacity_tokens=24)
    tokens, pages = random_inputs(config, 25), some_pages(config)
    with pytest.raises(CapacityError, match="capacity_tokens=24"):
        hybrid_attention_paged(
            Inputs(**tokens, feature_q_weight=torch.zeros(1, 8, 8), feature_k_weight=torch.zeros(1, 8, 8)),
            config,
            PagedStates(
                memory_of(pages, pages.columns),
                torch.zeros(1, dtype=torch.int64),
                Packing(torch.tensor([0, 25]), torch.arange(pages.columns)[None].int(), 25, pages),
            ),
            torch.empty_like(tokens["query"]),
        )


@CACHES
def test_kernels_get_contiguous_heads_and_states_in_their_pages(
    cache: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads are slices of one projection; memory that is not what the kernels compute addresses by is refused, not read."""
    launch = pytest.importorskip("still_kernels.hybrid_attention.launch")
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(launch, "launch_hybrid_attention", lambda *given: seen.append(given))
    monkeypatch.setattr(paged, "demand_kernel", lambda *_: None)
    config = HybridAttentionConfig(**SIZES, capacity_tokens=64, gate="none", cache=cache)
    heads = torch.randn(5, 8 * 8).to("meta").split([32, 16, 16], dim=-1)
    weight = torch.zeros(1, 8, 8, device="meta")
    inputs = Inputs(*(x.unflatten(-1, (-1, 8)) for x in heads), None, weight, weight)
    pages = Pages.of(config, config.capacity_slots, torch.float32)
    packing = Packing(torch.tensor([0, 5]), torch.arange(pages.columns)[None].int(), 16, pages)
    memory, length = memory_of(pages, 2 * pages.columns), torch.zeros(1, dtype=torch.int64)
    hybrid_attention_paged(inputs, config, PagedStates(memory, length, packing), torch.empty(5, 4, 8))
    given, _, state = seen[0][:3]
    assert all(x.is_contiguous() for x in (given.query, given.key, given.value))
    for name, shape, dtype, offset in pages.states:
        view = getattr(state, name)
        assert view.dtype == dtype and view.shape == (len(memory), *shape) and view[0].is_contiguous(), name
        assert view[3].data_ptr() == memory[3].data_ptr() + offset, name
    for wrong in (memory[:, :-64], memory.float()):
        with pytest.raises(ShapeError, match=f"pages {pages.size_bytes} bytes apart"):
            hybrid_attention_paged(
                inputs, config, PagedStates(wrong.contiguous(), length, packing), torch.empty(5, 4, 8)
            )


LLAMA = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}


SHAPES = pytest.mark.parametrize(
    "sizes", [LLAMA, {**LLAMA, "select_scope": "kv_group_max"}, {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64}]
)


@CACHES
@SHAPES
def test_pages_grow_with_the_context_and_waste_little(sizes: dict[str, Any], cache: str | None) -> None:
    config = HybridAttentionConfig(**sizes, capacity_tokens=65536, cache=cache)
    pages = Pages.of(config, config.capacity_slots, torch.bfloat16)
    state = HybridAttentionState.empty(config, 1, torch.bfloat16, "meta")
    exact = sum(x.numel() * x.itemsize for name, x in state.tensors().items() if name != "length")
    assert exact <= pages.after(65536) * pages.size_bytes < 1.1 * exact
    fixed = exact - sum(state.tensors()[name].nbytes for name in paged.GROWING if name in state.tensors())
    assert fixed <= pages.after(1) * pages.size_bytes < 1.7 * fixed
    counts = [pages.after(tokens) for tokens in range(1, 65537, 64)]
    assert counts == sorted(counts) and counts[0] == pages.first and counts[-1] <= pages.columns
    ends = {}
    for name, shape, dtype, offset in pages.states:
        ends[name] = offset + math.prod(shape) * dtype.itemsize
        assert ends[name] <= pages.size_bytes and offset % 64 == 0, name
    assert pages.rows % 128 == 0 and pages.size_bytes % 64 == 0


@SHAPES
@pytest.mark.parametrize("linear", [torch.float32, torch.bfloat16])
def test_rows_in_8_bits_take_half_of_the_pages(sizes: dict[str, Any], linear: torch.dtype) -> None:
    sixteen, codes = (
        Pages.of(config, config.capacity_slots, torch.bfloat16, linear)
        for config in (HybridAttentionConfig(**sizes, capacity_tokens=65536, cache=cache) for cache in (None, "int8"))
    )

    def grown(pages: Pages) -> int:
        return (pages.after(65536) - pages.first) * pages.size_bytes

    assert 0.49 < grown(codes) / grown(sixteen) < 0.58  # 0.52 of rows with their scales, and what pages waste
    assert codes.first * codes.size_bytes < 1.05 * sixteen.first * sixteen.size_bytes
    ends = {name: (offset, offset + math.prod(shape) * dtype.itemsize) for name, shape, dtype, offset in codes.states}
    for name in ("salient_key", "salient_value"):
        assert ends[name][0] == 0 and ends[name][1] == ends[f"{name}_scale"][0], "scales lie behind the rows"


def test_pages_that_an_engine_makes_larger_hold_whole_rows() -> None:
    config = HybridAttentionConfig(**LLAMA)
    pages = Pages.of(config, 100, torch.bfloat16)
    assert pages.padded(2 * pages.size_bytes).kernel == (2 * pages.size_bytes, *pages.kernel[1:])
    for size in (pages.size_bytes + 64, pages.size_bytes - 256):
        with pytest.raises(ShapeError, match=f"pages of {size} bytes"):
            pages.padded(size)


def codes_in_pages_and_without(sizes: dict[str, Any], rows: int, dtype: torch.dtype, device: str) -> None:
    """The kernels of calls whose rows in 8 bits lie in pages, beside the same kernels without pages; fails where these differ."""
    launch = pytest.importorskip("still_kernels.hybrid_attention.launch")
    chunk = sizes["chunk_size"]
    config = HybridAttentionConfig(**sizes, capacity_tokens=34 * chunk, cache="int8")
    pages = Pages.of(config, config.capacity_slots, dtype)
    generator = torch.Generator(device).manual_seed(0)
    memory = memory_of(pages, rows * pages.columns).to(device)
    table = torch.randperm(rows * pages.columns, device=device, generator=generator).int().view(rows, -1)
    state = HybridAttentionState.empty(config, rows, dtype, device)
    blocks = launch.device_table(config, torch.device(device), dtype == torch.float32)
    heads = rows * config.num_heads
    blocks = for_many_rows(blocks, 90, config.head_dim, config.projection_dim, heads if device != "cpu" else MANY_HEADS)
    blocks = changed(blocks, "scan", dict.fromkeys((*BY_TMA.values(), "decode_clusters"), 0))

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=generator).to(dtype)

    weights = [draw(config.num_heads, config.head_dim, config.head_dim) * config.head_dim**-0.5 for _ in "qk"]
    start = torch.arange(rows + 1, device=device, dtype=torch.int32)
    for tokens in (16 * chunk - 3, *[1] * 5, 16 * chunk, 1):  # 33 chunks: salient rows of several pages
        query, gate = (draw(rows, tokens, config.num_heads, config.head_dim) for _ in "qg")
        key, value = (rounded(draw(rows, tokens, config.num_kv_heads, config.head_dim)) for _ in "kv")
        new = torch.full((rows,), tokens, device=device)
        expected = torch.full_like(query, float("nan"))
        given = Inputs(query, key, value, gate.sigmoid(), *weights, new)
        launch.launch_hybrid_attention(given, config, state, expected, None, blocks)
        output = torch.full_like(query.flatten(0, 1), float("nan"))
        packed = Inputs(*(x.flatten(0, 1) for x in (query, key, value, gate.sigmoid())), *weights)
        views = HybridAttentionState(**pages.views(memory), length=state.length)
        packing = Packing(tokens * start, table, tokens, pages)
        launch.launch_hybrid_attention(packed, config, views, output, packing, blocks if device == "cpu" else None)
        assert bool(output.isfinite().all())
        distance = (output.double() - expected.flatten(0, 1).double()).norm() / expected.double().norm()
        assert float(distance) < (NARROW_NORM if dtype != torch.float32 else 1e-6), f"{tokens} tokens"
        state.length.add_(new)
    for name, view in pages.views(memory).items():
        if name.startswith(("window_key", "window_value", "salient_key", "salient_value")):
            wanted = getattr(state, name)
            found = paged._gathered(name, view, table.long(), pages, pages.slots)[:, :, : wanted.shape[2]]
            filled = config.slots_for(int(state.length[0])) if name in paged.GROWING else wanted.shape[2]
            assert torch.equal(found[:, :, :filled], wanted[:, :, :filled]), name


@pytest.mark.gpu
@pytest.mark.parametrize("scope", ["q_head", "kv_group_max"])
@pytest.mark.parametrize("rows", [2, 33])
def test_int8_kernels_in_pages_are_those_without(rows: int, scope: str) -> None:
    sizes = {**LLAMA, "chunk_size": 64, "salient_per_chunk": 8, "select_scope": scope}
    codes_in_pages_and_without(sizes, rows, torch.bfloat16, "cuda")


def test_steps_of_many_rows_have_fewer_programs() -> None:
    config = HybridAttentionConfig(num_heads=32, num_kv_heads=8, head_dim=128, chunk_size=64, salient_per_chunk=4)
    table = tile_table(90, 128, 64, 128, False)
    many = for_many_rows(table, 90, 128, 128, MANY_HEADS)
    assert [plan_constants(config, t)["value_slices"] for t in (table, many)] == [4, 0]
    assert many.tiles["decode"].constants["LF"] == 32
    assert for_many_rows(table, 90, 128, 128, MANY_HEADS - 1) == table
    assert for_many_rows(table, 80, 128, 128, MANY_HEADS) == table  # not measured there
