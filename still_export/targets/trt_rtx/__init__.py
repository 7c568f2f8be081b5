"""TensorRT-RTX: no plugins, so that function bodies are inlined."""
