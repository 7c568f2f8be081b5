"""STILL's hybrid attention: module, cache, traced op, mixer."""
