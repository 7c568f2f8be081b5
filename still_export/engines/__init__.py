"""The build verb: engines of packages whose target has some, with the TensorRT of this machine."""
