"""Opening packages: the list of runtimes, PyTorch's runner, and one model class for all of them."""
