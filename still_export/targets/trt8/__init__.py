"""Workarounds for TensorRT 8.6."""
