"""The traced form: the torch op `still::rank_one_attention`."""

from __future__ import annotations

from still_kernels.rank_one_attention.meaning import Inputs, chunked_rank_one_attention
from still_kernels.rank_one_attention.spec import RANK_ONE_ATTENTION
from still_kernels.torch_ops import op_of_one_state

rank_one_attention = op_of_one_state(RANK_ONE_ATTENTION, Inputs, chunked_rank_one_attention)
"""Of inputs and a state [B, H, D, V], float32 (float64 for float64 inputs): output [B, T, H, V] and the state after the call."""
