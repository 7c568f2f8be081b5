"""Softmax attention with a cache that keeps chosen chunks alone: definition."""
