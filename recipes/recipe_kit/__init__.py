"""What the recipes share. `Recipe`, `main`: loading or building a pair of models, running it four ways, keeping and reporting what was
measured. `study`, `study_cli`: the same for recipes that measure acceptance, row by row."""

from . import smollm2
from .cli import main
from .recipe import Recipe, RecipeError

__all__ = ["Recipe", "RecipeError", "main", "smollm2"]
