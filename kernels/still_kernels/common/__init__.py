"""What kernels of several ops share: blocks of GEMMs, device functions, and the factory of ops without a state."""
