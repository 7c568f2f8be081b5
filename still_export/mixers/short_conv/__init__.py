"""A gated short convolution, as in LFM2: module and mixer."""
