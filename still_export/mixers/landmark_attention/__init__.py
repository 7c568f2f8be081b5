"""Landmark attention, over still::LandmarkAttention."""
