"""RWKV-6 and RWKV-7 in the place of a Qwen's softmax, as RADLADS has them: module and mixer."""
