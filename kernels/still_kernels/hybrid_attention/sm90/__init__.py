"""Kernels of prefill for sm_90, in Gluon."""
