"""TensorRT: the package, its plugin library and its engines."""
