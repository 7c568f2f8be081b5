"""The build verb: engines of packages, built with this machine's TensorRT."""
