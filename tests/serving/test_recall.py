"""How many of the nearest an approximate index finds where more are asked for than it was tuned with."""

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from serving.gallery.gallery import Gallery, GalleryItem
from serving.gallery.search.filter import Equal
from tests.serving.vectors import MANUAL, MODEL, normalized

DIMENSION, CLUSTERS, EACH = 64, 120, 30


def drawn(centres: NDArray[np.float64], seed: int) -> NDArray[np.float32]:
    """Vectors close about centres, of which the next ones are far away: the hard case beyond EACH."""
    return normalized(centres + 0.25 * np.random.default_rng(seed).standard_normal(centres.shape))


CENTRES = np.random.default_rng(0).standard_normal((CLUSTERS, DIMENSION))
VECTORS = drawn(np.repeat(CENTRES, EACH, axis=0), 1)
QUERIES = drawn(CENTRES[:40], 2)


@pytest.fixture(scope="module", params=["HNSW16,SQ8,RFlat", "IVF32,PQ16x4fs,RFlat"])
def gallery(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gallery]:
    gallery = Gallery.create(
        tmp_path_factory.mktemp("galleries") / "a",
        **{**MODEL, "dimension": DIMENSION},
        index=request.param,
        recall=0.95,
        policy=MANUAL,
    )
    gallery.upsert(
        [
            GalleryItem(f"{i}", row, f"label {i // EACH}", metadata={"half": i % 2})
            for i, row in enumerate(VECTORS)
        ]
    )
    gallery.rebuild()
    yield gallery
    gallery.close()


@pytest.mark.parametrize("k", [10, 30, 60, 100])
@pytest.mark.parametrize("half", [False, True])
def test_as_many_are_found_of_more(gallery: Gallery, k: int, half: bool) -> None:
    scores = QUERIES @ VECTORS.T
    if half:
        scores[:, 1::2] = -2
    nearest = np.argsort(-scores, axis=1)[:, :k]
    found = gallery.search(QUERIES, k, filter=Equal("half", 0) if half else None)
    shares = [
        len({int(hit.key) for hit in hits} & set(row.tolist())) / k
        for hits, row in zip(found, nearest, strict=True)
    ]
    assert np.mean(shares) > 0.93


def test_as_many_labels_are_found(gallery: Gallery) -> None:
    best = (QUERIES @ VECTORS.T).reshape(len(QUERIES), CLUSTERS, EACH).max(axis=2)
    nearest = np.argsort(-best, axis=1)[:, :10]
    found = gallery.search(QUERIES, 10, group_by_label=True)
    shares = [
        len({int(hit.label.split()[1]) for hit in hits} & set(row.tolist())) / 10
        for hits, row in zip(found, nearest, strict=True)
    ]
    assert np.mean(shares) > 0.93
