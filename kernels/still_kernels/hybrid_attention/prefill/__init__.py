"""Triton kernels of calls with several tokens."""
