"""The feed-forward layers that each token was routed to: definition."""
