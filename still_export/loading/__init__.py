"""From a package to a model that answers: every runtime in one list, PyTorch's runner, and one object for all of them."""
