"""S in bfloat16 beside what rounding took: the numbers, and sums in it at lengths where plain bfloat16 has stopped to grow."""

from __future__ import annotations

import pytest
import torch

from still_graphs.errors import UnsupportedError
from still_kernels.hybrid_attention.config import HybridAttentionConfig
from still_kernels.hybrid_attention.meaning.inputs import Inputs
from still_kernels.hybrid_attention.meaning.state import HybridAttentionState
from still_kernels.hybrid_attention.narrow import MOST, narrowed, widened
from still_kernels.hybrid_attention.paged import hybrid_attention_paged
from still_kernels.hybrid_attention.pages import Pages
from still_kernels.packing import Packing, PagedStates

REST = 2.0**-16
"""Half a 256th of the last of eight places, against the least number that has these places."""


def test_both_together_are_the_number() -> None:
    torch.manual_seed(0)
    x = torch.randn(50000) * 10.0 ** torch.randint(-30, 30, (50000,))
    x = torch.cat([x, -x, torch.tensor([2.0, 1.9999, -1.0001, 3e38])])
    kept, rest = narrowed(x)
    assert (kept.dtype, rest.dtype) == (torch.bfloat16, torch.int8) and torch.equal(kept, x.bfloat16())
    off = (widened(kept, rest) - x).abs() / x.abs()
    ties = rest.abs() == MOST  # where half a last place is beyond the rest
    assert float(off[~ties].max()) <= REST < float(off[ties].max()) <= 2 * REST and float(off.mean()) < REST / 2


def test_what_nothing_is_added_to_stays() -> None:
    """Every bfloat16 with every rest that it may have; a call that promotes nothing reads and writes them."""
    kept = torch.arange(0, 1 << 16, 37).to(torch.uint16).view(torch.bfloat16)
    kept = kept[kept.isfinite()][:, None].expand(-1, 2 * MOST + 1)
    rest = torch.arange(-MOST, MOST + 1).to(torch.int8).expand_as(kept)
    again = narrowed(widened(kept, rest))
    held = widened(kept, rest).bfloat16() == kept  # below a power of two the last place is half as large
    assert torch.equal(again[0][held], kept[held]) and float(held.float().mean()) > 0.99
    normal = held & (kept.abs() > 1e-32)
    assert torch.equal(again[1][normal], rest[normal])
    assert torch.equal(widened(*again), widened(kept, rest))


def test_what_is_too_small_for_a_rest_has_none() -> None:
    x = torch.tensor([0.0, -0.0, 1e-40, -1e-36, 1.17e-38])
    kept, rest = narrowed(x)
    assert not rest.any() and torch.equal(widened(kept, rest), kept.float())


SIZES = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "chunk_size": 8, "salient_per_chunk": 0, "gate": "none"}


def last_outputs(linear: torch.dtype, calls: int, drop: bool = False) -> torch.Tensor:
    """Of the last of so many calls of 16 tokens of two requests, whose values have a mean."""
    generator = torch.Generator().manual_seed(0)
    config = HybridAttentionConfig(**SIZES, capacity_tokens=16 * calls)
    weights = [torch.randn(2, 8, 8, generator=generator) * 8**-0.5 for _ in "qk"]
    pages = Pages.of(config, config.capacity_slots, torch.float32, linear)
    memory = torch.full((2 * pages.columns, pages.size_bytes // 4), float("nan")).view(torch.int8)
    table = torch.arange(2 * pages.columns, dtype=torch.int32).view(2, -1)
    start, output = torch.tensor([0, 16, 32], dtype=torch.int32), torch.empty(32, 2, 8)
    for call in range(calls):
        query, key, value = (torch.randn(32, heads, 8, generator=generator) for heads in (2, 1, 1))
        inputs = Inputs(query, key, value + 1, None, *weights)
        states = PagedStates(memory, torch.full((2,), 16 * call), Packing(start, table, 16, pages))
        hybrid_attention_paged(inputs, config, states, output.fill_(float("nan")))
        if drop:
            pages.views(memory)["kv_rest"][table[:, 1 : pages.first].long()] = 0
    return output


def test_sums_stay_right_at_length_with_the_rest_and_not_without() -> None:
    """The rest is what does it: dropped after each call, 11,264 tokens are as far off as a sum in bfloat16."""
    exact, kept, dropped = (
        last_outputs(torch.float32, 704),
        last_outputs(torch.bfloat16, 704),
        last_outputs(torch.bfloat16, 704, drop=True),
    )
    off, without = ((found - exact).norm() / exact.norm() for found in (kept, dropped))
    assert float(off) < 2.0**-13 < 2.0**-3 < float(without)


def test_pages_hold_both_and_are_smaller() -> None:
    config = HybridAttentionConfig(num_heads=32, num_kv_heads=8, head_dim=128, capacity_tokens=65536)
    wide, narrow = (
        Pages.of(config, config.capacity_slots, torch.bfloat16, kind) for kind in (torch.float32, torch.bfloat16)
    )
    views = narrow.views(torch.zeros(1, narrow.size_bytes, dtype=torch.int8))
    sums = narrow.heads * 256 * 128
    assert views["kv_state"].shape == views["kv_rest"].shape and narrow.kernel[-1] == narrow.rest >= 2 * sums
    assert narrow.rest + sums <= narrow.size_bytes and narrow.rest % 64 == 0 and wide.kernel[-1] == wide.rest == 0
    taken = [pages.first * pages.size_bytes for pages in (narrow, wide)]
    assert taken[0] < 0.85 * taken[1]


def test_without_pages_there_is_no_rest() -> None:
    config = HybridAttentionConfig(**SIZES)
    state = HybridAttentionState.empty(config, 1)
    object.__setattr__(state, "kv_state", state.kv_state.bfloat16())
    with pytest.raises(UnsupportedError, match="kv_state is bfloat16"):
        state.check(config, 1)
