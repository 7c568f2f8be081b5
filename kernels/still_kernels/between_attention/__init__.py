"""What lies between a layer's attention and the next one's: definition and kernels."""

from still_kernels.between_attention.op import OP, Inputs, Variant, naive_between_attention

__all__ = ["OP", "Inputs", "Variant", "naive_between_attention"]
