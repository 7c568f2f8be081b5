"""Targets, one folder each: how a package is written and built."""
