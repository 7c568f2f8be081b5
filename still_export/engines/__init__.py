"""Engines of packages, built with the TensorRT of this machine."""
