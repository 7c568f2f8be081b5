"""onnxruntime-genai: its folder of a model."""
