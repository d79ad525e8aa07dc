"""JSON text into a Recipe: positions, `extends` and `--set`, the schema and the rules beyond it."""

from dsft.recipe.load import load_recipe
from dsft.recipe.record import Recipe

__all__ = ["Recipe", "load_recipe"]
