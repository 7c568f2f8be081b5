"""What one layer does with its tokens and its state: modules for transformers, caches, traced ops."""
