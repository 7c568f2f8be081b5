"""Keys and values as caches in 8 bits hold them: definition and kernel."""

from still_kernels.round_key_value.inputs import Inputs
from still_kernels.round_key_value.naive import naive_round_key_value

__all__ = ["Inputs", "naive_round_key_value"]
