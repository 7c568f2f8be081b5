"""STILL's hybrid attention: reference, stateful form, kernels."""
