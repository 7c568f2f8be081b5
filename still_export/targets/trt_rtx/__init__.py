"""TensorRT-RTX has no plugins, so function bodies are inlined."""
