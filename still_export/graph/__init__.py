"""A model as an ONNX graph: traced, lowered, fused, merged, its weights on disk."""
