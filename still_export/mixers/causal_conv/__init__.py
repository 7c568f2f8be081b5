"""The short convolution in front of linear attention: traced op."""
