"""Building TensorRT engines, and the check of what was built."""
