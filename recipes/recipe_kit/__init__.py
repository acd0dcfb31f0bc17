"""What the recipes share: loading or building a pair of models, running it four ways, keeping and reporting what was measured."""

from .cli import main
from .recipe import Recipe, RecipeError

__all__ = ["Recipe", "RecipeError", "main"]
