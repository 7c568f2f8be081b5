"""A gated short convolution alone, as LFM2 has it: module and mixer."""
