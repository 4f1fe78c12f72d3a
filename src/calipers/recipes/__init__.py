"""What a user writes, and what it means for a model."""

from __future__ import annotations

from calipers.recipes.schema import Recipe, Stage, load_changed_recipe, load_recipe

__all__ = ["Recipe", "Stage", "load_changed_recipe", "load_recipe"]
