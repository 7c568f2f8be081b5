"""Implementations of the ops: definitions in PyTorch, Triton kernels, ahead-of-time archive."""
