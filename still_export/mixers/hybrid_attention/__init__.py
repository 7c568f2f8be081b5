"""STILL's hybrid attention: module, cache, traced op, mixer; ties, which need no torch."""
