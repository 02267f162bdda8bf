"""Embedders of several folds, each alone and all as one; and what repeats of that tell."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from training.evaluation.paired import interval

__all__ = ["FIGURES", "concatenate", "mean_of", "measure_ensemble", "over_repeats"]

FIGURES = ("recall_at_1", "map_at_r", "r_precision")

Figures = dict[str, float]


def concatenate(parts: Sequence[Tensor]) -> Tensor:
    """Put embeddings of the same N images side by side, each part and the whole at unit length.

    Args:
        parts: One float (N, d_f) for each fold f.

    Returns:
        float (N, Σ d_f).
    """
    return functional.normalize(
        torch.cat([functional.normalize(part, dim=1) for part in parts], dim=1), dim=1
    )


def measure_ensemble(
    parts: Sequence[Tensor], measure: Callable[[Tensor], Mapping[str, Any]]
) -> dict[str, Any]:
    """Measure the embeddings of each fold by themselves and all of them concatenated.

    Args:
        parts: One float (N, d) for each fold, rows in the same order.
        measure: What `measure_retrieval` does, for these images.

    Returns:
        JSON-able: `by_fold` (the figures of each), `separate` (their mean), `concatenated`, and `queries`,
        `excluded` and `gallery`, which are the same for all.
    """
    found = [measure(part) for part in parts]
    whole = measure(concatenate(parts))
    folds = [_figures(each) for each in found]
    return {
        "by_fold": folds,
        "separate": mean_of(folds),
        "concatenated": _figures(whole),
        "queries": whole["queries"],
        "excluded": whole["excluded"],
        "gallery": whole["gallery"],
    }


def mean_of(figures: Sequence[Figures]) -> Figures:
    """Average each figure."""
    return {name: float(np.mean([each[name] for each in figures])) for name in FIGURES}


def over_repeats(figures: Sequence[Figures]) -> dict[str, dict[str, float | None]]:
    """Give the mean over repeats and half the width of its Student-t interval of 95 % confidence.

    Returns:
        `mean` and `half_width` of each figure; one repeat tells nothing of the spread, so that its is None.
    """
    found: dict[str, dict[str, float | None]] = {}
    for name in FIGURES:
        mean, half = interval([each[name] for each in figures])
        found[name] = {"mean": mean, "half_width": half}
    return found


def _figures(found: Mapping[str, Any]) -> Figures:
    return {
        "recall_at_1": found["recall_at"]["1"],
        "map_at_r": found["map_at_r"],
        "r_precision": found["r_precision"],
    }
