"""Softmax attention to latents that all heads share (MLA), as Kimi Linear has it: module and mixer."""
