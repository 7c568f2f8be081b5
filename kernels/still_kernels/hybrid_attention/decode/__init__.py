"""Triton kernels of calls with one token."""
