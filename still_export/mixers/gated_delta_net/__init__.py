"""The gated delta rule after a short convolution, as in Qwen3.5, Qwen3-Next and OLMo-Hybrid: module and mixer."""
