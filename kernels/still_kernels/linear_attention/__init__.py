"""Linear attention with a recurrent state: definition and chunked PyTorch form."""
