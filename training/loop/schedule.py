"""Schedules: what a learning rate and lambda are multiplied by at each step."""

import math
from bisect import bisect_right

from training.recipes.recipe import Recipe

__all__ = ["rate_factor", "xml_weight"]


def rate_factor(step: int, steps: int, recipe: Recipe, *, per_epoch: int = 1) -> float:
    """Give the share of the peak learning rate at `step` of `steps`, counted from 0.

    A line up to 1 over the warm-up, then half a cosine down to 0, or 1 throughout, or `drop_factor` for each
    of `drop_epochs` that has ended, an epoch being `per_epoch` steps.
    """
    warmup = round(recipe.warmup * steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if recipe.schedule == "constant":
        return 1.0
    if recipe.schedule == "drops":
        return recipe.drop_factor ** bisect_right(sorted(recipe.drop_epochs), step // per_epoch)
    return _half_cosine((step - warmup) / (steps - warmup))


def xml_weight(step: int, steps: int, recipe: Recipe) -> float:
    """Give lambda at `step` of `steps`, counted from 0.

    A line up to `xml_weight` over the warm-up, then as it is, or down to 0 in a line or half a cosine.
    """
    warmup = round(recipe.xml_warmup * steps)
    if step < warmup:
        return recipe.xml_weight * (step + 1) / (warmup + 1)
    gone = (step - warmup) / (steps - warmup)
    falling = {"constant": 1.0, "linear": 1 - gone, "cosine": _half_cosine(gone)}
    return recipe.xml_weight * falling[recipe.xml_schedule]


def _half_cosine(gone: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * gone))
