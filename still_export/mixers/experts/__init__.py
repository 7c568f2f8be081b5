"""Experts and the router in front of them: traced ops, and the module in the place of a family's block."""
