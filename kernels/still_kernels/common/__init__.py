"""Shared parts of several ops' kernels: blocks of GEMMs, device functions, and the factory of ops without a state."""
