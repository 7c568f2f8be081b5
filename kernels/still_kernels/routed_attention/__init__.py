"""The gated delta rule over chunks of which some are taken back: definition."""

from still_kernels.op_kernels import offers

__all__ = ["Inputs", "RoutedState", "routed_attention"]

__getattr__ = offers(__name__, "naive")
