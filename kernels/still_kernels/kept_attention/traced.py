"""The traced form of attention to kept chunks: the torch op `still::kept_attention`."""

from __future__ import annotations

from still_kernels.kept_attention.meaning import Inputs, KeptState
from still_kernels.kept_attention.meaning import kept_attention as compute
from still_kernels.kept_attention.spec import KEPT_ATTENTION
from still_kernels.torch_ops import op_of_states

kept_attention = op_of_states(KEPT_ATTENTION, Inputs, KeptState, compute)
"""Of inputs, states and whether to write into them: output and the states after the call."""
