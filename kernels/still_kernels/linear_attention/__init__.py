"""Linear attention with a recurrent state: definition and chunked PyTorch form."""

from typing import TYPE_CHECKING

from still_kernels.op_kernels import offers

if TYPE_CHECKING:
    from still_kernels.linear_attention.chunked import chunked_linear_attention
    from still_kernels.linear_attention.inputs import Inputs, empty_state
    from still_kernels.linear_attention.naive import naive_linear_attention

__all__ = ["Inputs", "chunked_linear_attention", "empty_state", "naive_linear_attention"]

__getattr__ = offers(__name__, "chunked", "inputs", "naive")
