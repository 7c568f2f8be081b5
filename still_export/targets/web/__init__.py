"""Browsers, by onnxruntime-web."""
