"""The portable package: standard ops, and still::* nodes with function bodies."""
