"""Readers of published files: tensors, configurations, tokenizers."""
