"""Liger-GLA in the place of softmax attention: half a window of softmax, half GLA, without parameters of its own."""
