"""Models in GGUF files: configuration, weights and tokenizer as their Hugging Face folders have them."""

from still_export.gguf.tokenizer import read_tokenizer
from still_export.models.gguf.model import read_gguf

__all__ = ["read_gguf", "read_tokenizer"]
