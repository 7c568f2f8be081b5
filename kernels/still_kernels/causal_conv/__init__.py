"""A causal convolution per channel with the latest tokens as state: definition and PyTorch form."""
