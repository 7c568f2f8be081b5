"""Kernels for sm_90: prefill in Gluon, decode in CUDA C++."""
