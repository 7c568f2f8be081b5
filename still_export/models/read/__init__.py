"""Other people's files: tensors, configurations, tokenizers."""
