"""Mergeable summaries of streams of tensors."""
