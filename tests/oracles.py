"""Oracles: each formula again as naive float64 loops, or by `lstsq`, with nothing taken from the product."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def histogram(locations: Floats, codebook: Floats, scale: float, assign_on: str) -> Floats:
    """Eq. 2.4: π_ij = softmax_i(ε ν_i·x_j) / n, z_i = Σ_j π_ij; (B, n, d), (m, d) -> (B, m)."""
    z = np.zeros((len(locations), len(codebook)))
    for b, image in enumerate(locations):
        for x in image:
            scores = []
            for v in codebook:
                length = 1.0
                if assign_on == "unit":
                    length = float(np.linalg.norm(v) * np.linalg.norm(x))
                if assign_on == "ball":
                    length = max(1.0, float(np.linalg.norm(x)))
                scores.append(np.exp(scale * float(v @ x) / length))
            for i, score in enumerate(scores):
                z[b, i] += score / sum(scores) / len(image)
    return z


def ridge(histograms: Floats, embeddings: Floats, penalty: float) -> Floats:
    """Eq. 2.8 as least squares of the augmented system [Zᵀ; √ϵ I] Vᵀ = [Yᵀ; 0]; -> V (d, m)."""
    return weighted_ridge([(1.0, histograms, embeddings)], penalty)


def weighted_ridge(batches: list[tuple[float, Floats, Floats]], penalty: float) -> Floats:
    """V = argmin Σ_k w_k ‖VZ_k − Y_k‖² + penalty ‖V‖² by `lstsq`, all batches at once; -> V (d, m)."""
    count, dimension = batches[0][1].shape[1], batches[0][2].shape[1]
    left = [np.sqrt(w) * z for w, z, _ in batches] + [np.sqrt(penalty) * np.eye(count)]
    right = [np.sqrt(w) * y for w, _, y in batches] + [np.zeros((count, dimension))]
    solution: Floats = np.linalg.lstsq(np.vstack(left), np.vstack(right), rcond=None)[0]
    return solution.T


def cosine(a: Floats, b: Floats) -> float:
    return float(a @ b) / float(np.linalg.norm(a) * np.linalg.norm(b))


Pairs = list[tuple[int, Floats, Floats]]


def each_pair(embeddings: Floats, labels: Ints, *references: npt.NDArray[Any]) -> tuple[Pairs, Pairs]:
    """Positive and negative pairs as (anchor, its embedding, the other's), of a batch or against others.

    `references` are the embeddings and labels of the others, where a batch is not compared with itself.
    """
    positive, negative = [], []
    others = references or (embeddings, labels)
    for i, (a, label) in enumerate(zip(embeddings, labels, strict=True)):
        for j, (b, name) in enumerate(zip(*others, strict=True)):
            if label != name:
                negative.append((i, a, b))
            elif references or i != j:
                positive.append((i, a, b))
    return positive, negative


def contrastive(
    *batch: Any, pos_margin: float = 1.0, neg_margin: float = 0.5, distance: str = "cosine"
) -> float:
    """Contrastive loss on cosines: the mean over the pairs that still violate their margin, by kind.

    Or on distances ‖a/|a| − b/|b|‖, where a pair of one class falls short by being farther than its margin.
    """
    total = 0.0
    positive, negative = each_pair(*batch)
    for sign, margin, pairs in ((1, pos_margin, positive), (-1, neg_margin, negative)):
        if distance == "cosine":
            short = [sign * (margin - cosine(a, b)) for _, a, b in pairs]
        else:
            apart = [np.linalg.norm(a / np.linalg.norm(a) - b / np.linalg.norm(b)) for _, a, b in pairs]
            short = [sign * (float(each) - margin) for each in apart]
        violations = [each for each in short if each > 0]
        total += float(np.mean(violations)) if violations else 0.0
    return total


def cross_batch(
    histograms: Floats, embeddings: Floats, labels: Ints, first: list[bool], penalty: float, unit: bool,
    **margins: Any,
) -> float:  # fmt: skip
    """Eq. 2.10 and 2.11 with the contrastive loss; `first` says which rows are in the first half."""
    rows1 = [i for i in range(len(labels)) if first[i]]
    rows2 = [i for i in range(len(labels)) if not first[i]]
    targets = np.array([y / np.linalg.norm(y) for y in embeddings]) if unit else embeddings
    total = 0.0
    for mine, other in ((rows1, rows2), (rows2, rows1)):
        v = ridge(histograms[other], targets[other], penalty)
        expressed = np.array([v @ histograms[i] for i in mine])
        total += contrastive(expressed, labels[mine], **margins)
    return total


def signs_of_life(
    histograms: Floats, embeddings: Floats, labels: Ints, first: npt.NDArray[np.bool_], penalty: float,
    trace: bool,
) -> dict[str, float]:  # fmt: skip
    """Entropies, eigenvalues, and cosines of embeddings that the other half expresses, pair by pair."""

    def effective(shares: Floats) -> float:
        return float(np.exp(-sum(share * np.log(share) for share in shares if share > 0)))

    expressed, counts = np.zeros_like(embeddings), []
    for mine in (first, ~first):
        z = histograms[~mine]
        level = penalty * float(np.trace(z.T @ z)) / z.shape[1] if trace else penalty
        counts.append(sum(value > level for value in np.linalg.eigvalsh(z.T @ z)))
        expressed[mine] = histograms[mine] @ ridge(z, embeddings[~mine], level).T

    images = range(len(labels))
    apart = [(i, j) for i in images for j in images if labels[i] != labels[j] and first[i] == first[j]]
    return {
        "prototypes_in_use": effective(histograms.mean(axis=0)),
        "prototypes_an_image": float(np.mean([effective(z) for z in histograms])),
        "eigenvalues": float(np.mean(counts)),
        "expressed_cosine": float(np.mean([cosine(expressed[i], expressed[j]) for i, j in apart])),
        "rebuilt_cosine": float(np.mean([cosine(expressed[i], embeddings[i]) for i in images])),
    }


def assign(locations: Floats, prototypes: Floats, metric: str) -> Ints:
    """Definition 1 for one image, location by location; (n, d), (m, d) -> (n,)."""
    scores: dict[str, Callable[[Floats, Floats], float]] = {
        "euclidean": lambda x, v: -float(np.linalg.norm(x - v)),
        "inner": lambda x, v: float(x @ v),
        "cosine": cosine,
    }
    return np.array([int(np.argmax([scores[metric](x, v) for v in prototypes])) for x in locations])


Figures = tuple[dict[int, float], float, float, int]


def retrieval(
    queries: Floats, labels: Ints, at: tuple[int, ...], gallery: Floats | None = None,
    names: Ints | None = None, groups: Ints | None = None, gallery_groups: Ints | None = None,
) -> Figures:  # fmt: skip
    """R@k, MAP@R, R-precision and the number of queries without a match; a query's own group is not there."""
    itself = gallery is None
    references, reference_labels = (queries, labels) if gallery is None or names is None else (gallery, names)
    held = groups if gallery_groups is None else gallery_groups
    hits: dict[int, list[float]] = {k: [] for k in at}
    average, precision, excluded = [], [], 0
    for q in range(len(queries)):
        ranked = []
        for r in range(len(references)):
            out = groups is not None and held is not None and groups[q] == held[r]
            if not out and not (itself and r == q):
                ranked.append((-cosine(queries[q], references[r]), r))
        # Rounded, so that what is equal on paper ties here as well, and the index decides.
        match = [reference_labels[r] == labels[q] for _, r in sorted((round(s, 9), r) for s, r in ranked)]
        wanted = sum(match)
        if wanted == 0:
            excluded += 1
            continue
        for k in at:
            hits[k].append(float(any(match[:k])))
        precision.append(sum(match[:wanted]) / wanted)
        average.append(sum(sum(match[: j + 1]) / (j + 1) for j in range(wanted) if match[j]) / wanted)
    recall = {k: float(np.mean(v)) for k, v in hits.items()}
    return recall, float(np.mean(average)), float(np.mean(precision)), excluded


def neighbours(vectors: Floats, depth: int) -> Ints:
    """Indices of the nearest others of each row by cosine, equals by index; (N, d) -> (N, depth)."""
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    found = []
    for q, query in enumerate(unit):
        similarity = np.round(unit @ query, 9)  # what is equal on paper ties
        others = sorted((-similarity[r], r) for r in range(len(unit)) if r != q)
        found.append([r for _, r in others[:depth]])
    return np.array(found)


def map_at_r(vectors: Floats, labels: Ints) -> float:
    """MAP@R of a set in itself; NaN where no query has a match."""
    if np.bincount(labels).max() < 2:
        return float("nan")
    return retrieval(vectors, labels, ())[1]


def expressed(histograms: Floats, embeddings: Floats, fitted: Ints, measured: Ints, penalty: float) -> Floats:
    """V z of the measured images, V fitted by `lstsq` to unit embeddings of the fitted; images by index."""
    unit = np.array([y / np.linalg.norm(y) for y in embeddings])
    v = ridge(histograms[fitted], unit[fitted], penalty)
    return np.array([v @ histograms[i] for i in measured])
