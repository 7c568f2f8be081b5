"""Read GGUF files: keys, architectures as published configurations, tokenizers. Without torch, which takes seconds to import."""
