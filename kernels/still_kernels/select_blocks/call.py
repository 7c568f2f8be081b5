"""Calls of still::SelectBlocks: choice of implementation, and launch of the Triton kernels."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from still_graphs.errors import UnsupportedError
from still_kernels import launcher
from still_kernels.forms import has_kernels
from still_kernels.select_blocks.meaning import Inputs, naive_select_blocks
from still_kernels.select_blocks.plan import KERNELS
from still_kernels.select_blocks.spec import SELECT_BLOCKS
from still_kernels.sizes import tensors_of
from still_kernels.tile import TileTable
from still_kernels.torch_ops import traced_op

_prepared = launcher.cached_launches(KERNELS)


def launch_select_blocks(inputs: Inputs, sums: Tensor, blocks: Tensor, table: TileTable | None = None) -> None:
    """Run the kernels on `sums` [B, HK, N, D], in place, and write `blocks` int32 [B, T, HK, slots]. Nothing is read back to the host.

    Args:
        inputs: Contiguous.
    """
    query = inputs.query
    shape = zip("BTHD", query.shape, strict=True)
    sizes = (*shape, ("HK", inputs.key.shape[2]), ("N", sums.shape[2]), ("block_slots", inputs.block_slots))
    attributes = tuple((a.name, getattr(inputs, a.name)) for a in SELECT_BLOCKS.attributes)
    prepared = _prepared(query.device, table, query.dtype, sizes, attributes)
    launcher.Launcher().run(prepared, {**tensors_of(inputs), "key_sum": sums, "blocks": blocks}, query)


@traced_op(SELECT_BLOCKS, Inputs)
def select_blocks(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Like `naive_select_blocks`. The Triton kernels run on CUDA if they cover the call. A traced program has one node."""
    if not has_kernels(inputs.query.device):
        return naive_select_blocks(inputs, state)
    inputs.check(state)
    call = replace(inputs, query=inputs.query.contiguous(), key=inputs.key.contiguous())
    sums = launcher.written(state, in_place=False)
    shape = (*inputs.key.shape[:3], inputs.block_slots)
    blocks = torch.full(shape, -1, dtype=torch.int32, device=state.device)
    try:
        launch_select_blocks(call, sums, blocks)
    except UnsupportedError:
        return naive_select_blocks(inputs, state)
    return blocks, sums
