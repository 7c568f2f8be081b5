"""The experts of each token: definition and kernels."""
