"""Mamba-3 with one input and output (SISO), as in flash-linear-attention: module and mixer."""
