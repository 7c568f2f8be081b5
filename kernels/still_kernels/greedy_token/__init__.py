"""The likeliest token: definition and kernels."""

from still_kernels.greedy_token.op import OP, Inputs, Variant, naive_greedy_token

__all__ = ["OP", "Inputs", "Variant", "naive_greedy_token"]
