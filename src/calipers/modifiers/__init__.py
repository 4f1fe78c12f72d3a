"""Steps that a recipe is made of."""
