"""One folder a target: how a package of it is written and built."""
