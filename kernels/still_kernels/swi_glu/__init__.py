"""The gate of a feed-forward layer: definition and kernels."""

from still_kernels.swi_glu.op import OP, Inputs, Variant, naive_swi_glu

__all__ = ["OP", "Inputs", "Variant", "naive_swi_glu"]
