"""Function bodies of the ops in standard ONNX ops."""
