"""Recipes: a YAML file each, and what may stand in one."""
