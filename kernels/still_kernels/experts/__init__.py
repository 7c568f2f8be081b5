"""The feed-forward experts of each token: definition."""
