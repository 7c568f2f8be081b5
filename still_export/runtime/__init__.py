"""Runners: one per runtime; they know the package's tensors and no model."""
