"""Runs the plan of still::BlockAttention with Triton."""

from __future__ import annotations

from torch import Tensor

from still_kernels import launcher
from still_kernels.attention import AttentionState
from still_kernels.block_attention.naive import Inputs
from still_kernels.block_attention.variants import KERNELS
from still_kernels.tile import TileTable

_prepared = launcher.kept(KERNELS)


def launch_block_attention(
    inputs: Inputs, state: AttentionState, output: Tensor, table: TileTable | None = None
) -> None:
    """Run the kernels on `state`, in place; `state.length` is read and left for the caller to advance. Nothing is read back to the host.

    Args:
        inputs: Contiguous, with `new_tokens`.
        output: As query.

    Raises:
        UnsupportedError: No kernel covers the call; the message lists what is covered.
    """
    query, blocks = inputs.query, inputs.blocks
    assert blocks is not None
    shape = zip("BTHD", query.shape, strict=True)
    sizes = (*shape, ("HK", inputs.key.shape[2]), ("N", state.rows), ("S", blocks.shape[3]))
    prepared = _prepared(query.device, table, query.dtype, sizes, (("block_size", inputs.block_size),))
    tensors = {name: x for name, x in vars(inputs).items() if isinstance(x, Tensor)}
    states = {"present_key": state.key, "present_value": state.value, "past_length": state.length}
    launcher.Launcher().run(prepared, {**tensors, **states, "output": output}, query)
