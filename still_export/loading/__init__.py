"""Open packages: a list of all runtimes, PyTorch's runner, and one object for all of them."""
