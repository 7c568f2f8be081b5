"""Feed-forward layers with gates, sums in float32: definition and kernels."""

from still_kernels.gated_mlp.inputs import Inputs
from still_kernels.gated_mlp.naive import naive_gated_mlp

__all__ = ["Inputs", "naive_gated_mlp"]
