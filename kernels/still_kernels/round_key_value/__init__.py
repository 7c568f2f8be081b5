"""Keys and values as caches in 8 bits hold them: definition and kernels."""

from still_kernels.round_key_value.op import OP, Inputs, Variant, naive_round_key_value

__all__ = ["OP", "Inputs", "Variant", "naive_round_key_value"]
