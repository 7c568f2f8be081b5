"""Softmax attention of which each token takes some heads (MoH), those of its longest queries; over still::Route and still::Attention."""
