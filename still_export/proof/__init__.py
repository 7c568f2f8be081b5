"""The proof: a package, a model or a server against PyTorch."""
