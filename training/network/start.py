"""A run's backbone as training started it, to be measured beside the run on the same images."""

from dataclasses import dataclass

from training.data.pictures import Embed
from training.network.embedder import Embedder, array_function, build_embedder, pooled_function
from training.recipes.recipe import Recipe

__all__ = ["Start", "open_start"]


@dataclass(frozen=True, slots=True)
class Start:
    """How the untrained backbone describes images, by its pooled features."""

    channels: int  # C
    shared: bool  # whether the backbone has rested, so that its maps serve the run, too
    maps: Embed  # pixels, uint8 (B, S, S, 3), to these maps, or to themselves where none are shared
    pooled: Embed  # what `maps` gives to features (B, C)


def open_start(embedder: Embedder, recipe: Recipe) -> Start:
    """Build the backbone of a run as training started it; the errors are those of `build_embedder`."""
    shared = recipe.caches_features
    # where maps are shared, any weights do
    start = build_embedder(recipe.model_copy(update={"weights": "none"}) if shared else recipe)
    maps = array_function(embedder, "cpu", False, embedder.backbone) if shared else lambda pixels: pixels
    return Start(start.backbone.channels, shared, maps, pooled_function(start, mapped=shared))
