"""The latest earlier tokens of each token's cluster: definition."""
