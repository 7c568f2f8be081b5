"""Linear attention on an engine's pages on the CPU: requests come and go, pages are used again, nobody clears them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from still_graphs.errors import ShapeError
from still_kernels.linear_attention.chunked import chunked_linear_attention
from still_kernels.linear_attention.meaning import Inputs, empty_state
from still_kernels.linear_attention.paged import linear_attention_paged
from still_kernels.linear_attention.pages import ALIGNMENT, Pages
from still_kernels.packing import Packing, PagedStates

H, HQ, G, HK, D, V = 6, 3, 2, 2, 5, 7


def tokens_of(count: int) -> dict[str, Tensor]:
    query, key, value = torch.randn(count, HQ, G, D), torch.randn(count, HK, D), torch.randn(count, H, V)
    return {
        "query": query,
        "key": torch.nn.functional.normalize(key, dim=-1),
        "value": value,
        "decay": -torch.rand(count, H, 1),
        "beta": torch.rand(count, H),
    }


def test_requests_that_share_pages_equal_each_alone() -> None:
    torch.manual_seed(0)
    least = Pages.of(H, D, V)
    pages = least.padded(least.size_bytes + ALIGNMENT)
    memory = torch.full((5, pages.size_bytes // 4), torch.nan).view(torch.int8)
    free, owned, seen = [3, 1, 4, 2], {}, {}  # page 0 is nobody's
    alone: dict[int, Tensor] = {}
    for step in range(24):
        if len(seen) < 3 and step % 3 == 0:
            seen[step], owned[step], alone[step] = 0, free.pop(), empty_state(1, H, D, V)
        rows = sorted(seen, key=lambda request: (request * 7 + step) % 5)
        counts = [0 if step % 5 == 4 and i else (1 if step % 2 else 3 * i + step) for i in range(len(rows))]
        tokens = tokens_of(sum(counts) + 2)  # the last ones are padding
        start = torch.tensor([0, *counts]).cumsum(0).int()
        output = torch.full((len(tokens["query"]), HQ, H // HQ * G, V), -7.0)
        table = torch.tensor([[owned[request]] for request in rows], dtype=torch.int32)
        length = torch.tensor([seen[request] for request in rows])
        packing = Packing(start, table, max(counts), pages)
        linear_attention_paged(Inputs(**tokens), PagedStates(memory, length, packing), output.view(-1, H, G, V))
        assert bool((output[int(start[-1]) :] == -7).all())
        assert bool(memory[0].view(torch.float32).isnan().all()), "the page that is nobody's was written"
        for request, count, begin in zip(rows, counts, start.tolist(), strict=False):
            if count:
                own = {name: x[None, begin : begin + count] for name, x in tokens.items()}
                expected, alone[request] = chunked_linear_attention(Inputs(**own), alone[request])
                torch.testing.assert_close(
                    output.view(-1, H, G, V)[begin : begin + count], expected[0], rtol=1e-5, atol=1e-6
                )
            seen[request] += count
            if seen[request] > 60:
                free.insert(0, owned.pop(request))
                del seen[request], alone[request]
    assert len(free) < 4 and step == 23


def test_memory_that_is_laid_out_otherwise_is_refused() -> None:
    pages = Pages.of(H, D, V)
    with pytest.raises(ShapeError, match=f"pages {pages.size_bytes} bytes apart"):
        pages.view(torch.zeros(2, pages.size_bytes + ALIGNMENT, dtype=torch.int8))
    for wrong in (pages.size_bytes - ALIGNMENT, pages.size_bytes + 4):
        with pytest.raises(ShapeError, match=f"multiple of {ALIGNMENT}, at least {pages.size_bytes}"):
            pages.padded(wrong)
