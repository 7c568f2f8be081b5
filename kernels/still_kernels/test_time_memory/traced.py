"""The traced form of a memory that is trained as tokens pass: the torch op `still::test_time_memory`."""

from __future__ import annotations

from still_kernels.test_time_memory.meaning import Inputs, MemoryState
from still_kernels.test_time_memory.meaning import read_and_learn as compute
from still_kernels.test_time_memory.spec import TEST_TIME_MEMORY
from still_kernels.torch_ops import op_of_states

read_and_learn = op_of_states(TEST_TIME_MEMORY, Inputs, MemoryState, lambda inputs, state, _: compute(inputs, state))
"""Of inputs and states: output and the states after the call."""
