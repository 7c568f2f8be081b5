"""Feed-forward layers with gates: definition and kernels."""

from still_kernels.gated_mlp.op import OP, Inputs, Variant, naive_gated_mlp

__all__ = ["OP", "Inputs", "Variant", "naive_gated_mlp"]
