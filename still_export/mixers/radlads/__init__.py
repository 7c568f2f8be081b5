"""RWKV-6 and RWKV-7, replacing a Qwen's softmax, as in RADLADS: module and mixer."""
