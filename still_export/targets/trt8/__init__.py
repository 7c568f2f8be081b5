"""What TensorRT 8.6 alone needs."""
