"""onnxruntime-genai and its model folder."""
