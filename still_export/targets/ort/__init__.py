"""ONNX Runtime: kernels of this project in its library of custom ops."""
