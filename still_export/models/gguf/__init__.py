"""Models in GGUF files: configuration, weights and tokenizer as their Hugging Face folders have them."""

from still_export.models.gguf.model import read_gguf
from still_export.models.gguf.tokenizer import read_tokenizer

__all__ = ["read_gguf", "read_tokenizer"]
