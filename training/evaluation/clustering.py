"""NMI and AMI: how far clusters that k-means finds among embeddings are the classes; scikit-learn's work."""

import warnings

import numpy as np
import numpy.typing as npt
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import adjusted_mutual_info_score, normalized_mutual_info_score

from training.evaluation.metrics import unit_rows

__all__ = ["agreement", "cluster_figures"]


def cluster_figures(
    embeddings: npt.ArrayLike, labels: npt.NDArray[np.int64], *, seed: int = 0
) -> dict[str, float]:
    """Cluster embeddings at unit length by Lloyd's k-means, into as many clusters as there are classes.

    It starts once from centres drawn by k-means++, and takes at most 100 rounds.

    Args:
        embeddings: Finite, float (N, d), of any norm.
        labels: int64 (N,).
        seed: Of the first centres.

    Returns:
        `nmi` and `ami` of clusters and classes, see `agreement`.
    """
    means = KMeans(len(np.unique(labels)), n_init=1, max_iter=100, random_state=seed)
    with warnings.catch_warnings():
        # Fewer distinct embeddings than classes leave clusters empty, which the figures tell as it is.
        warnings.simplefilter("ignore", ConvergenceWarning)
        found = means.fit_predict(unit_rows(np.asarray(embeddings, dtype=np.float32)))
    nmi, ami = agreement(found, labels)
    return {"nmi": nmi, "ami": ami}


def agreement(clusters: npt.NDArray[np.integer], labels: npt.NDArray[np.integer]) -> tuple[float, float]:
    """Compare two partitions of the same images, integer (N,) both.

    Returns:
        NMI, the mutual information I over the mean of both entropies H, in [0, 1]; and AMI,
        (I − E) / (H − E) with E the I to be expected of two partitions of these sizes by chance, at most 1
        and about 0 by chance.
    """
    return (
        float(normalized_mutual_info_score(labels, clusters)),
        float(adjusted_mutual_info_score(labels, clusters)),
    )
