"""From a model to a package: trace, lower, write."""
