"""Kernels of calls with several tokens, in Triton."""
