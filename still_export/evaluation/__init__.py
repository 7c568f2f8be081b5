"""What a model knows and how fast a package is."""
