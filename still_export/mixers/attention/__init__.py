"""Softmax attention with a cache: module, cache, traced op, mixer."""
