"""Softmax attention whose cache has only retained chunks: definition."""
