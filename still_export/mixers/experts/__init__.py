"""Experts and their router: traced ops, and the module that replaces a family's block."""
