"""The settings of a recipe, a section a file; `training.recipes.recipe.Recipe` is all of them together."""
