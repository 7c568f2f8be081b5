"""Softmax attention and Mamba-2 in parallel in a layer, as in Falcon-H1: cache and mixer."""
