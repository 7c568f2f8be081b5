"""What a layer does with its tokens and state: modules for transformers, caches, traced ops."""
