"""Which experts each token goes to: definition."""
