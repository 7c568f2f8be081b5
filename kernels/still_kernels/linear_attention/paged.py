"""Linear attention on states in the pages of a serving engine, which are not cleared. States are updated in place."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from still_kernels.linear_attention.chunked import chunked_linear_attention
from still_kernels.linear_attention.meaning import Inputs
from still_kernels.linear_attention.pages import Pages
from still_kernels.packing import Packing, PagedStates
from still_kernels.sizes import tensors_of


def linear_attention_paged(inputs: Inputs, paged: PagedStates, output: Tensor) -> None:
    """Linear attention of packed sequences whose states are in pages.

    On CUDA nothing is read back to the host, and no state is copied. On CPUs sequences are gathered, computed in chunks and written back.

    Args:
        inputs: Tokens [tokens, ...] of these sequences and of others.
        paged: Their states, with a table [B, 1] of each sequence's page.
        output: [tokens, HQ, G, V], contiguous, written at the sequences' tokens.

    Raises:
        UnsupportedError: No kernel covers the layer on its device.
        ShapeError: The memory does not match `Pages`.
    """
    pages = paged.packing.pages
    assert isinstance(pages, Pages)
    states = pages.view(paged.memory)
    if inputs.query.device.type == "cpu":
        _in_chunks(inputs, states, paged.length, paged.packing, output)
        return
    from still_kernels.linear_attention.call import launch_linear_attention

    tensors = {name: x.contiguous() for name, x in tensors_of(inputs).items()}
    tensors |= {name: x.float() for name, x in tensors.items() if name in ("decay", "beta")}
    launch_linear_attention(replace(inputs, **tensors), states, output, paged.packing, past_length=paged.length)  # type: ignore[arg-type]


def _in_chunks(inputs: Inputs, states: Tensor, length: Tensor, packing: Packing, output: Tensor) -> None:
    counts = packing.query_start.diff().long()
    live = counts > 0
    if not bool(live.any()):
        return
    counts, start = counts[live], packing.query_start[:-1][live].long()
    page, length = packing.state_row[live, 0].long(), length[live]
    column = torch.arange(int(counts.max()))
    real = column < counts[:, None]
    place = torch.where(real, start[:, None] + column, 0)  # [B, T]
    padded = replace(inputs, **{name: x[place] for name, x in tensors_of(inputs).items()}, new_tokens=counts)  # type: ignore[arg-type]
    before = torch.where((length > 0)[:, None, None, None], states[page], 0)
    result, present = chunked_linear_attention(padded, before)
    output[place[real]] = result.flatten(2, 3)[real].view(-1, *output.shape[1:])
    states[page] = present
