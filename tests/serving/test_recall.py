"""How many of the nearest an approximate index finds where more are asked for than it was tuned with."""

from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
from numpy.typing import NDArray

from serving.gallery.gallery import Gallery, Item
from serving.gallery.search.filter import Equal
from tests.serving.vectors import created, normalized

DIMENSION, CLUSTERS, EACH = 64, 120, 30


def drawn(centres: NDArray[np.float64], seed: int) -> NDArray[np.float32]:
    """Vectors close about centres, of which the next ones are far away: the hard case beyond EACH."""
    return normalized(centres + 0.25 * np.random.default_rng(seed).standard_normal(centres.shape))


CENTRES = np.random.default_rng(0).standard_normal((CLUSTERS, DIMENSION))
VECTORS = drawn(np.repeat(CENTRES, EACH, axis=0), 1)
QUERIES = drawn(CENTRES[:40], 2)


@pytest.fixture(scope="module", params=["HNSW16,SQ8,RFlat", "IVF32,PQ16x4fs,RFlat"])
def gallery(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gallery]:
    path = tmp_path_factory.mktemp("galleries") / "a"
    with closing(created(path, DIMENSION, index=request.param, recall=0.95)) as gallery:
        gallery.upsert(
            Item(f"{i}", row, f"{i // EACH}", metadata={"half": i % 2}) for i, row in enumerate(VECTORS)
        )
        gallery.rebuild()
        yield gallery


def share(found: list[list[int]], scores: NDArray[np.float32], k: int) -> float:
    """Return which part of the k largest scores (Q, n) was found."""
    nearest = np.argsort(-scores, axis=1)[:, :k].tolist()
    return float(np.mean([len({*a} & {*b}) / k for a, b in zip(found, nearest, strict=True)]))


@pytest.mark.parametrize("k", [10, 30, 60, 100])
@pytest.mark.parametrize("half", [False, True])
def test_as_many_are_found_of_more(gallery: Gallery, k: int, half: bool) -> None:
    scores = QUERIES @ VECTORS.T
    if half:
        scores[:, 1::2] = -2
    found = gallery.search(QUERIES, k, filter=Equal("half", 0) if half else None)
    assert share([[int(hit.key) for hit in hits] for hits in found], scores, k) > 0.93


def test_as_many_labels_are_found(gallery: Gallery) -> None:
    best = (QUERIES @ VECTORS.T).reshape(len(QUERIES), CLUSTERS, EACH).max(axis=2)
    found = gallery.search(QUERIES, 10, group_by_label=True)
    assert share([[int(hit.label) for hit in hits] for hits in found], best, 10) > 0.93
