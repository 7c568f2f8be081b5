"""Of each token the latest ones before it that are of its cluster: definition."""
