"""Content of GGUF files: keys, architectures as published configurations, tokenizers. No torch, which takes seconds to import."""
