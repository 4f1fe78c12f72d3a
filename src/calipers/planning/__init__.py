"""What a recipe means for one model, resolved once."""
