"""Formats, layouts and quantization parameters: pure functions on tensors."""
