"""The histogram operator: the share of an image that each prototype of a codebook takes.

Letters: B images, n locations, d dimensions, m prototypes. The paper calls both the ν of this operator and
the V fitted to a batch prototypes; ν is the `codebook` here, and V are the fitted prototypes.
"""

from typing import get_args

from torch import Tensor
from torch.nn import functional

from serving.errors import BadSetting
from training.method.precision import full_precision
from training.recipes.recipe import AssignOn

__all__ = ["histogram"]


@full_precision
def histogram(
    locations: Tensor, codebook: Tensor, *, assignment_scale: float = 60.0, assign_on: AssignOn = "unit"
) -> Tensor:
    """Share of an image's locations that each prototype takes, by soft assignment (eq. 2.4).

    Args:
        locations: Local features x_j, float (B, n, d).
        codebook: Prototypes ν_i, float (m, d).
        assignment_scale: ε, the inverse temperature of the assignment; the larger, the harder.
        assign_on: `unit` compares unit features with unit prototypes, so that `assignment_scale` scales a
            cosine; `raw` takes both as they are; `ball` shrinks features into the unit ball, x / max(1, |x|),
            and leaves the prototypes as they are, as the authors' own layer does (Gürbüz et al., "Generalized
            Sum Pooling for Metric Learning", ICCV 2023).

    Returns:
        Histograms z, float32 (float64 for float64 features) (B, m), in [0, 1]; each row sums to one.

    Raises:
        BadSetting: When `assign_on` is unknown.
        ValueError: When the shapes do not fit.
    """
    if assign_on not in get_args(AssignOn):
        raise BadSetting(f"assign_on is {assign_on!r}, but it must be one of {', '.join(get_args(AssignOn))}")
    if locations.ndim != 3 or codebook.ndim != 2 or locations.shape[2] != codebook.shape[1]:
        raise ValueError(
            f"locations (B, n, d) and a codebook (m, d) must share d, but their shapes are"
            f" {tuple(locations.shape)} and {tuple(codebook.shape)}"
        )
    if assign_on == "unit":
        codebook = functional.normalize(codebook, dim=1)
    scores = locations @ (assignment_scale * codebook).T  # (B, n, d) x (d, m) -> (B, n, m)
    if assign_on != "raw":  # the products are divided and not the features, of which there are more
        least = 1.0 if assign_on == "ball" else 1e-12
        scores = scores * locations.norm(dim=2, keepdim=True).clamp_min(least).reciprocal()
    return scores.softmax(dim=2).mean(dim=1)  # π_ij = softmax_i(ε ν_i·x_j) / n; z_i = Σ_j π_ij
