"""A causal convolution per channel with the latest tokens as state: definition and PyTorch form."""

from typing import TYPE_CHECKING

from still_kernels.op_kernels import offers

if TYPE_CHECKING:
    from still_kernels.causal_conv.inputs import Inputs, empty_state
    from still_kernels.causal_conv.naive import naive_causal_conv
    from still_kernels.causal_conv.whole import whole_causal_conv

__all__ = ["Inputs", "empty_state", "naive_causal_conv", "whole_causal_conv"]

__getattr__ = offers(__name__, "inputs", "naive", "whole")
