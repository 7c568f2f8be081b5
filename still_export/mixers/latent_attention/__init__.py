"""Softmax attention to latents that all heads share (MLA), as in Kimi Linear: module and mixer."""
