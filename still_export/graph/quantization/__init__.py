"""Weights in low bits: which role may have how many, who rounds them, how a graph holds them."""
