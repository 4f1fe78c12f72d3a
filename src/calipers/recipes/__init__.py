"""What a user writes, and what it means for a model."""
