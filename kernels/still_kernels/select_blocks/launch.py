"""Runs the plan of still::SelectBlocks with Triton."""

from __future__ import annotations

from torch import Tensor

from still_graphs.ops.select_blocks import SELECT_BLOCKS
from still_kernels import launcher
from still_kernels.select_blocks.naive import Inputs
from still_kernels.select_blocks.variants import KERNELS
from still_kernels.tile import TileTable

_prepared = launcher.kept(KERNELS)


def launch_select_blocks(inputs: Inputs, sums: Tensor, blocks: Tensor, table: TileTable | None = None) -> None:
    """Run the kernels on `sums` [B, HK, N, D], in place, into `blocks` int32 [B, T, HK, slots]. Nothing is read back to the host.

    Args:
        inputs: Contiguous.

    Raises:
        UnsupportedError: No kernel covers the call; the message lists what is covered.
    """
    query = inputs.query
    shape = zip("BTHD", query.shape, strict=True)
    sizes = (*shape, ("HK", inputs.key.shape[2]), ("N", sums.shape[2]), ("block_slots", inputs.block_slots))
    attributes = tuple((a.name, getattr(inputs, a.name)) for a in SELECT_BLOCKS.attributes)
    prepared = _prepared(query.device, table, query.dtype, sizes, attributes)
    tensors = {name: x for name, x in vars(inputs).items() if isinstance(x, Tensor)}
    launcher.Launcher().run(prepared, {**tensors, "key_sum": sums, "blocks": blocks}, query)
