"""What the ops mean: specifications, ONNX function bodies, graph passes. Imports neither torch nor TensorRT."""
