"""Ideas beyond the paper, tried on cached features: `python benchmarks/ideas.py IDEA --data DIR --out CSV`.

`variants`: the term and what may be made of it, on folds of the training classes; among these a histogram
of each cell of a grid over the image, which tells where a prototype is found. `criterion`: which figure of
validation classes picks the training that is best on the unseen ones; a row is the MAP@R there of what a
criterion picks among all rates and lengths, and the rank correlation of the two over these.
"""

import argparse
import csv
import itertools
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import spearmanr
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import study
from serving.catalog.catalog import Row, read, select
from training.data.feature_cache import cache_features
from training.data.partition import Partition, divide
from training.data.pictures import embed_pictures
from training.evaluation.fitted import fitted_figures
from training.evaluation.metrics import retrieval_metrics
from training.loop.fit import fit
from training.loop.processes import processes
from training.loop.trainee import build_network, freeze_weights, start_trainee
from training.losses.loss import build_loss
from training.method.cross_batch import cross_batch_loss
from training.network.embedder import Embedder, describer_function
from training.recipes.recipe import Recipe
from training.recipes.recipe_file import load_recipe

__all__ = ["VARIANTS", "compare_criteria", "compare_variants", "main"]

VARIANTS = {
    "without XML": ("xml_weight=0", 0),
    "XML": ("", 0),
    "grid of 2 x 2": ("", 2),
    "grid of 3 x 3": ("", 3),
    "recursion over the other half's classes": ("xml_prototypes=recursion", 0),
    "fades": ("xml_schedule=linear", 0),
    "warms up": ("xml_warmup=0.5", 0),
    "prototypes rebuild": ("reconstruction_weight=1", 0),
    "fitted at unit length": ("fit_on=unit", 0),
    "prototypes from k-centre": ("codebook_init=k_centre", 0),
    "prototypes from k-means": ("codebook_init=k_means", 0),
    "relative ridge": ("ridge_on=trace ridge=0.05", 0),
}
"""Settings of each, and the cells a side of the grid that its histograms tell apart; 0 is without."""

_LENGTHS = (1, 2, 4, 8)
_HALVINGS = 20


class GridEmbedder(Embedder):
    """Its histograms tell the cells of a grid over the places apart, (B, cells² m)."""

    cells = 1

    def histogram(self, locations: Tensor) -> Tensor:
        """Give the histograms of all cells side by side; a row still sums to one."""
        bands = locations.unflatten(1, self.grid).tensor_split(self.cells, dim=1)
        cells = [cell.flatten(1, 2) for band in bands for cell in band.tensor_split(self.cells, dim=2)]
        return torch.cat([Embedder.histogram(self, cell) for cell in cells], dim=1) / len(cells)


def compare_variants(data: Path, *, runs: int, extra: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Train heads without XML, with it, and with each of `VARIANTS`.

    Yields:
        A run: `head`, `variant`, `fold`, `map_at_r` and `recall_at_1` on the classes of the fold.
    """
    catalog = read(data)
    for head, fold, variant in itertools.product(study.HEADS, range(runs), VARIANTS):
        _, rates, weights = study.HEADS[head]
        common = [f"xml_weight={weights[1]}", f"head_learning_rate={rates[2]}", "location_share=1"]
        settings, cells = VARIANTS[variant]
        recipe = _recipe(head, *common, f"folds={runs}", f"fold={fold}", *settings.split(), *extra)
        partition = divide(catalog, recipe)
        embedder = _train(recipe, partition, cells=cells)
        embeddings, _, labels = _embed(embedder, recipe, partition.validation)
        figures = retrieval_metrics(embeddings, labels)
        scores = {"map_at_r": figures.map_at_r, "recall_at_1": figures.recall_at[1]}
        yield {"head": head, "variant": variant, "fold": fold, **scores}


def compare_criteria(data: Path, *, runs: int, extra: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Train heads from random weights at all rates and lengths, and let figures of validation classes choose.

    Yields:
        A seed and a criterion: `criterion`, `seed`, `map_at_r`, that of the chosen one on the unseen classes,
        and `correlation`, Spearman's, of the criterion with it over all.
    """
    catalog = read(data)
    rates = study.HEADS["random"][1]
    for seed in range(runs):
        told, unseen = [], []
        for rate, epochs in itertools.product(rates, _LENGTHS):
            arm = [f"head_learning_rate={rate}", f"epochs={epochs}", "xml_weight=0.1"]
            recipe = _recipe("random", *extra, *arm, f"seed={seed}", f"fold={seed % 3}")
            partition = divide(catalog, recipe)
            embedder = _train(recipe, partition)
            told.append(_criteria(embedder, recipe, partition.validation))
            embeddings, _, labels = _embed(embedder, recipe, select(catalog, "test", recipe.split))
            unseen.append(retrieval_metrics(embeddings, labels).map_at_r)
        best = int(np.argmax(unseen))
        yield {"criterion": "the best there is", "seed": seed, "map_at_r": unseen[best], "correlation": 1}
        for name in told[0]:
            values = [each[name] for each in told]
            chosen = unseen[int(np.argmax(values))]
            correlation = spearmanr(values, unseen).statistic
            yield {"criterion": name, "seed": seed, "map_at_r": chosen, "correlation": correlation}


def _train(recipe: Recipe, partition: Partition, *, cells: int = 0) -> Embedder:
    """Train a head, and give it as its last step leaves it; with `cells`, of a grid of as many a side."""
    with processes("cpu", recipe) as fabric, tempfile.TemporaryDirectory() as scratch:
        embedder, objective = build_network(recipe, classes=partition.classes, fresh=True)
        if cells:
            embedder = _gridded(embedder, recipe, cells)
        rows = sorted((*partition.train, *partition.validation), key=lambda row: row.key)
        features = cache_features(rows, embedder, recipe, views=recipe.views, folder=None)
        pictures = features.only(partition.train)
        network = (embedder, objective)
        trainee = start_trainee(recipe, network, pictures, fabric=fabric, fresh=True)
        folder, record = Path(scratch), dict[str, Any](metrics={})
        fit(recipe, trainee, pictures, None, folder, record, fresh=True)
        return trainee.eval_model


def _criteria(embedder: Embedder, recipe: Recipe, rows: Sequence[Row]) -> dict[str, float]:
    """Measure validation classes; of each figure, the more the better."""
    embeddings, histograms, labels = _embed(embedder, recipe, rows)
    figures = retrieval_metrics(embeddings, labels)
    fitted = fitted_figures(histograms, embeddings, labels, draws=100)
    loss = build_loss(recipe.loss, classes=1, dimension=recipe.dimension, **recipe.loss_options)
    halves = torch.Generator().manual_seed(0)
    xml = [
        cross_batch_loss(
            histograms, embeddings, torch.from_numpy(labels), loss, ridge=recipe.ridge, generator=halves
        )
        for _ in range(_HALVINGS)
    ]
    return {
        "MAP@R": figures.map_at_r,
        "R@1": figures.recall_at[1],
        "MAP_x": fitted["map_x"],
        "L_XML": -float(torch.stack(xml).mean()),
    }


@torch.no_grad()
def _embed(
    embedder: Embedder, recipe: Recipe, rows: Sequence[Row]
) -> tuple[Tensor, Tensor, NDArray[np.int64]]:
    """Give embeddings (N, d), histograms (N, m) and class numbers (N,) of images."""
    features = cache_features(rows, embedder, recipe, views=1, folder=None)
    found = torch.from_numpy(embed_pictures(describer_function(embedder, mapped=True), features))
    embeddings, histograms = found.tensor_split((recipe.dimension,), dim=1)
    return embeddings, histograms, features.labels


def _gridded(plain: Embedder, recipe: Recipe, cells: int) -> Embedder:
    """Give an embedder of the same weights whose histograms are those of a grid."""
    found = GridEmbedder(plain.backbone, recipe)
    found.cells = cells
    found.load_state_dict(plain.state_dict())
    freeze_weights(found, recipe)
    return found


def _recipe(head: str, *changes: str) -> Recipe:
    words = f"{study.COMMON} {study.SETS['cub100']} {study.HEADS[head][0]} loss=contrastive".split()
    return load_recipe("head", [*words, f"loss_options={study.LOSSES['contrastive']}", *changes])


def main(words: Sequence[str] | None = None) -> int:
    """Try an idea, and write its runs."""
    ideas = {"variants": compare_variants, "criterion": compare_criteria}
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("idea", choices=ideas)
    parser.add_argument("--data", type=Path, required=True, help="folder of class folders, such as CUB-100")
    parser.add_argument("--out", type=Path, required=True, help="CSV, a row a run")
    parser.add_argument("--runs", type=int, default=6, help="folds, or seeds")
    parser.add_argument("--set", nargs="*", default=[], help="further settings of all runs, key=value")
    options = parser.parse_args(words)
    rows = list(ideas[options.idea](options.data, runs=options.runs, extra=options.set))
    with options.out.open("w", encoding="utf-8", newline="") as lines:
        writer = csv.DictWriter(lines, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
