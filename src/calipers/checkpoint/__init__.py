"""Checkpoints that transformers and vLLM load."""
