"""Signs of life of the XML term: whether a half's prototypes tell images apart, and how hard the term pulls.

With features that all fall to the same few prototypes the fit has one direction, every expressed embedding
points along it, and the loss stands still whatever λ is. That shows in no curve of the loss.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from training.method.cross_batch import FitOn, express, fit_targets
from training.method.past import Past
from training.method.precision import full_precision
from training.method.prototypes import RidgeOn, scaled_ridge
from training.recipes.recipe import Recipe

__all__ = ["dead_note", "gradient_share", "watch_term"]

_ALIVE = 4
"""Fewer eigenvalues above the ridge than this express next to nothing."""


@torch.no_grad()
@full_precision
def watch_term(
    histograms: Tensor,
    embeddings: Tensor,
    labels: Tensor,
    first: Tensor,
    *,
    ridge: float,
    ridge_on: RidgeOn = "absolute",
    fit_on: FitOn = "raw",
    past: Past | None = None,
    kinds: Tensor | None = None,
) -> dict[str, float]:
    """Measure what the term makes of one batch.

    Args:
        histograms: Zᵀ, float (B, m).
        embeddings: Yᵀ, float (B, d).
        labels: Integer (B,).
        first: Which images are of the first half, bool (B,).
        ridge: ϵ of the fit.
        ridge_on: What scales it.
        fit_on: What the prototypes are fitted to.
        past: Earlier batches, which do not hold this one.
        kinds: What `first` splits and `past` is kept by, as for `cross_batch_loss`.

    Returns:
        Of these what the batch has, all finite: `prototypes_in_use`, exp of the entropy of the mean
        histogram, and `prototypes_an_image`, the mean of that of each, both in [1, m]; `eigenvalues`, how
        many of the ZZᵀ that is fitted exceed the ridge, the mean of both halves; `expressed_cosine`, the mean
        between expressed embeddings of different classes within a half; `rebuilt_cosine`, the mean of ŷ to y.
    """
    if not (histograms.isfinite().all() and embeddings.isfinite().all()):
        return {}  # which the loop tells of
    told = {
        "prototypes_in_use": _effective(histograms.mean(dim=0)),
        "prototypes_an_image": _effective(histograms).mean(),
    }
    kinds = labels if kinds is None else kinds
    if first.any() and not first.all():
        counts = []
        for half in (first, ~first):
            gram = histograms[half].T @ histograms[half]
            if past is not None:
                gram = gram + past.without(kinds[~half])[0]
            level = scaled_ridge(ridge, ridge_on, gram.trace(), len(gram))
            # float32 fails to converge where all images have one prototype; and on MPS there is neither
            counts.append((torch.linalg.eigvalsh(gram.cpu().double()) > level.cpu()).sum().double())
        told["eigenvalues"] = torch.stack(counts).mean()
        targets = fit_targets(embeddings, fit_on)
        expressed = express(histograms, targets, kinds, first, ridge=ridge, ridge_on=ridge_on, past=past)
        unit = functional.normalize(expressed, dim=1)
        apart = (labels[:, None] != labels) & (first[:, None] == first)
        told["expressed_cosine"] = (unit @ unit.T)[apart].mean()  # NaN where each half has one class
        told["rebuilt_cosine"] = functional.cosine_similarity(expressed, targets).mean()
    return {name: float(value) for name, value in told.items() if value.isfinite()}


def gradient_share(dml: Tensor, xml: Tensor, leaves: Sequence[Tensor], *, weight: float) -> float:
    """Give |λ ∂L_XML| / |(1 − λ) ∂L_DML| by some tensors taken together.

    Args:
        dml: L_DML, a scalar.
        xml: L_XML, a scalar.
        leaves: What the gradients are taken by, such as the local features that the head puts out.
        weight: λ.

    Returns:
        The share, of 1; infinite or NaN where the loss has no gradient there.
    """
    xml_length, dml_length = (
        torch.cat([
            gradient.flatten()
            for gradient in torch.autograd.grad(term, leaves, retain_graph=True, materialize_grads=True)
        ]).norm()
        for term in (xml, dml)
    )  # fmt: skip
    return float(weight * xml_length / ((1 - weight) * dml_length))


def dead_note(rows: Iterable[Mapping[str, Any]], recipe: Recipe) -> str | None:
    """Say that the term is dead, and what wakes it, if it was in the last of these epochs that measured it.

    Args:
        rows: Of metrics.csv.
        recipe: Of the run; one without XML has nothing that could be dead.
    """
    measured = [row for row in rows if "eigenvalues" in row]
    if not recipe.xml_weight or not measured:
        return None
    if measured[-1]["eigenvalues"] >= min(_ALIVE, recipe.prototypes):
        return None
    last = measured[-1]
    half = recipe.batch_size // 2
    cure = (
        f"A half of a batch is {half} images, and it needs more: raise classes_per_batch or images_per_class."
        if half < _ALIVE
        else "To wake it, set assignment_scale higher, assign_on to raw or ball, codebook_init to start from"
        " the images, or ridge lower."
    )
    return (
        f"The cross-batch term is dead at epoch {last['epoch']:g}: {last['eigenvalues']:g} of"
        f" {recipe.prototypes} eigenvalues of what its prototypes are fitted to are above the ridge, and with"
        f" fewer than {_ALIVE} it expresses all images alike. {cure}"
    )


def _effective(shares: Tensor) -> Tensor:
    """Give exp(−Σ p log p) over the last dimension."""
    entropy: Tensor = torch.special.entr(shares).sum(dim=-1)
    return entropy.exp()
