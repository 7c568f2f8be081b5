"""Routing Transformer, read causally; over still::Route, still::ClusterTokens and still::BlockAttention."""
