"""The gated delta rule behind a short convolution, as Qwen3.5, Qwen3-Next and OLMo-Hybrid have it: module and mixer."""
