"""Experts whose matrices have 4 or 8 bits: definition."""
