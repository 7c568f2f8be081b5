"""The traced form of the causal convolution: the torch op `still::causal_conv`."""

from __future__ import annotations

from still_kernels.causal_conv.call import causal_conv as kernel
from still_kernels.causal_conv.meaning import Inputs
from still_kernels.causal_conv.spec import CAUSAL_CONV
from still_kernels.torch_ops import op_of_one_state

causal_conv = op_of_one_state(CAUSAL_CONV, Inputs, kernel)
"""Of inputs with `new_tokens` and a state [B, C, K - 1]: output [B, T, C] and the state after the call."""
