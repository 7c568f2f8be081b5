"""Mamba-3 of one input and output, as flash-linear-attention has it: module and mixer."""
