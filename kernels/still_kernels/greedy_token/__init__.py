"""The likeliest token: definition and kernel."""

from still_kernels.greedy_token.inputs import Inputs
from still_kernels.greedy_token.naive import naive_greedy_token

__all__ = ["Inputs", "naive_greedy_token"]
