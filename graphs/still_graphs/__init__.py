"""Meaning of the ops: specifications, ONNX function bodies, graph passes. Imports neither torch nor TensorRT."""
