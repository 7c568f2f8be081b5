"""Linear attention with a recurrent state: definition and chunked PyTorch form."""

from still_kernels.linear_attention.chunked import chunked_linear_attention
from still_kernels.linear_attention.inputs import Inputs, empty_state
from still_kernels.linear_attention.naive import naive_linear_attention

__all__ = ["Inputs", "chunked_linear_attention", "empty_state", "naive_linear_attention"]
