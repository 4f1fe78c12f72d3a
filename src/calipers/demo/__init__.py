"""The tiny language model that ships with Calipers, and what ``calipers demo`` does with it."""

from pathlib import Path

MODEL = Path(__file__).parent / "model"
"""A folder that transformers loads; its README says how it was trained, and how well."""
