"""The settings of a recipe, a section a file; `training.recipe.Recipe` is all of them together."""
