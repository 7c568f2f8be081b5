"""PyTorch against a package's runtime: cases, tolerances, comparison."""
