"""The traced form of the choice of blocks: the torch op `still::select_blocks`."""

from __future__ import annotations

from still_kernels.select_blocks.call import select_blocks as kernel
from still_kernels.select_blocks.meaning import Inputs
from still_kernels.select_blocks.spec import SELECT_BLOCKS
from still_kernels.torch_ops import op_of_one_state

select_blocks = op_of_one_state(SELECT_BLOCKS, Inputs, kernel)
"""Of inputs and the sums of keys so far: blocks int32 [B, T, HK, slots], and the sums after the call."""
