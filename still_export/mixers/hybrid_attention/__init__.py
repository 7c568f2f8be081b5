"""STILL's hybrid attention: module, cache, traced op, mixer; excuses, which need no torch."""
