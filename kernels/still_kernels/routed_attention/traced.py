"""The traced form of attention that routes each token: the torch op `still::routed_attention`."""

from __future__ import annotations

from still_kernels.routed_attention.meaning import Inputs, RoutedState
from still_kernels.routed_attention.meaning import routed_attention as compute
from still_kernels.routed_attention.spec import ROUTED_ATTENTION
from still_kernels.torch_ops import op_of_states

routed_attention = op_of_states(ROUTED_ATTENTION, Inputs, RoutedState, lambda inputs, state, _: compute(inputs, state))
"""Of inputs and states: output and the states after the call."""
