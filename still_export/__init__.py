"""Linearize LLMs with STILL hybrid attention, export them with their state, and prove every target against PyTorch."""

__version__ = "0.1.0"
