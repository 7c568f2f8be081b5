"""Which blocks of the past each token reads: definition."""
