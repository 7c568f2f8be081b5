"""Hybrid attention in PyTorch: the definition, and forms in chunks and of whole sequences."""

from __future__ import annotations
