"""Softmax attention and Mamba-2 side by side in a layer, as Falcon-H1 has them: cache and mixer."""
