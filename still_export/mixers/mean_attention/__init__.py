"""Attention of vision models that divides by the number of tokens, read causally: a state that is a mean over the tokens so far."""
