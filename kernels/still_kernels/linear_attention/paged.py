"""How the state of a request lies in the pages of an engine: it does not grow, so that one page holds it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from still_graphs.errors import ShapeError
from still_kernels.linear_attention.chunked import chunked_linear_attention
from still_kernels.linear_attention.meaning import Inputs
from still_kernels.packing import Packing, PagedStates

ALIGNMENT = 64
"""Bytes that pages are multiples of: kernels read rows in wide pieces."""


@dataclass(frozen=True)
class Pages:
    """Pages that begin with a state [H, D, V] in float32.

    heads, dim, size: H, D, V.
    size_bytes: From a page to the next.
    """

    heads: int
    dim: int
    size: int
    size_bytes: int

    @classmethod
    def of(cls, heads: int, dim: int, size: int) -> Pages:
        """The smallest that hold it."""
        return cls(heads, dim, size, -(-heads * dim * size * 4 // ALIGNMENT) * ALIGNMENT)

    columns = 1

    def after(self, tokens: int) -> int:
        """Pages of a request of `tokens` tokens."""
        return 1

    def changing(self, tokens: int) -> tuple[int, ...]:
        """Columns of those pages of a request of `tokens` tokens that later tokens still write to."""
        return (0,)

    def padded(self, size_bytes: int) -> Pages:
        """The same in pages of an engine that made them larger.

        Raises:
            ShapeError: They do not hold the state, or are not aligned.
        """
        if size_bytes < self.size_bytes or size_bytes % ALIGNMENT:
            raise ShapeError(
                f"pages of {size_bytes} bytes; expected a multiple of {ALIGNMENT}, at least {self.size_bytes}."
            )
        return replace(self, size_bytes=size_bytes)

    def view(self, memory: Tensor) -> Tensor:
        """The states [pages, H, D, V] in int8 [pages, bytes], whose rows lie `size_bytes` apart.

        Raises:
            ShapeError: They lie otherwise.
        """
        # PyTorch gives the stride of a single row any value.
        apart = memory.stride(0) if len(memory) > 1 else self.size_bytes
        if memory.dtype != torch.int8 or memory.stride(1) != 1 or apart != self.size_bytes:
            raise ShapeError(
                f"memory {memory.dtype} {list(memory.shape)} has strides {memory.stride()}; expected int8, pages {self.size_bytes} "
                "bytes apart, the bytes of each side by side."
            )
        shape = (self.heads, self.dim, self.size)
        return memory[:, : 4 * self.heads * self.dim * self.size].view(torch.float32).unflatten(1, shape)


def linear_attention_paged(inputs: Inputs, paged: PagedStates, output: Tensor) -> None:
    """Linear attention of packed sequences whose states lie in pages.

    On CUDA nothing is read back to the host, and no state is copied; on the CPU sequences are gathered, computed by the chunked
    form and written back.

    Args:
        inputs: Tokens [tokens, ...], of these sequences and of others.
        paged: Their states, with a table [B, 1] of each sequence's page.
        output: [tokens, HQ, G, V], contiguous, written where the sequences have tokens.

    Raises:
        UnsupportedError: No kernel covers the layer on its device.
        ShapeError: The memory is not what `Pages` says.
    """
    pages = paged.packing.pages
    assert isinstance(pages, Pages)
    states = pages.view(paged.memory)
    if inputs.query.device.type == "cpu":
        _in_chunks(inputs, states, paged.length, paged.packing, output)
        return
    from still_kernels.linear_attention.call import launch_linear_attention

    given = {name: x.contiguous() for name, x in _tensors(inputs).items()}
    given |= {name: x.float() for name, x in given.items() if name in ("decay", "beta")}
    launch_linear_attention(replace(inputs, **given), states, output, paged.packing, past_length=paged.length)  # type: ignore[arg-type]


def _tensors(inputs: Inputs) -> dict[str, Tensor]:
    found = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    return {name: x for name, x in found.items() if isinstance(x, Tensor)}


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
    padded = replace(inputs, **{name: x[place] for name, x in _tensors(inputs).items()}, new_tokens=counts)  # type: ignore[arg-type]
    held = torch.where((length > 0)[:, None, None, None], states[page], 0)
    result, present = chunked_linear_attention(padded, held)
    output[place[real]] = result.flatten(2, 3)[real].view(-1, *output.shape[1:])
    states[page] = present
