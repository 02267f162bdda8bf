"""What single queries find: against loops, and the mean against MAP@R."""

import numpy as np
import pytest
import torch

from training.evaluation.metrics import retrieval_metrics
from training.evaluation.ranking import choose_queries, rank


def _by_hand(
    embeddings: np.ndarray, labels: list[int], query: int, references: list[int]
) -> tuple[list[int], float]:
    """References from near to far, and AP@R; float64."""

    def cosine(one: np.ndarray, other: np.ndarray) -> float:
        return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))

    order = sorted(references, key=lambda j: -cosine(embeddings[query], embeddings[j]))
    wanted = sum(labels[j] == labels[query] for j in references)
    hits, total = 0, 0.0
    for place, j in enumerate(order[:wanted], 1):
        if labels[j] == labels[query]:
            hits += 1
            total += hits / place
    return order, total / wanted


@pytest.fixture
def embeddings() -> np.ndarray:
    return np.random.default_rng(1).normal(size=(30, 5))


LABELS = [i % 4 for i in range(28)] + [4, 5]  # two are alone in their class


def test_each_query_by_hand(embeddings: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "training.evaluation.ranking._BLOCK_BYTES", 32 * 30 * 4
    )  # so that there are several blocks
    labels, roles = np.array(LABELS), np.array([""] * 30)
    found = rank(torch.from_numpy(embeddings), labels, roles, neighbours=6)
    assert found.queries.tolist() == list(range(28))
    for query in range(28):
        order, precision = _by_hand(embeddings, LABELS, query, [j for j in range(30) if j != query])
        assert found.nearest[query].tolist() == order[:6]
        assert found.precision[query] == pytest.approx(precision)
    assert found.similarity.shape == (28, 6)
    assert (np.diff(found.similarity, axis=1) <= 0).all()
    metrics = retrieval_metrics(embeddings, labels)
    assert found.precision.mean() == pytest.approx(metrics.map_at_r)


def test_queries_are_searched_in_the_gallery_alone(embeddings: np.ndarray) -> None:
    labels = np.array(LABELS)
    roles = np.array(["query", "gallery", "gallery"] * 9 + ["train", "query", "gallery"])
    found = rank(torch.from_numpy(embeddings), labels, roles, neighbours=100)
    held = np.flatnonzero(roles == "gallery").tolist()
    assert found.queries.tolist() == list(range(0, 27, 3))  # 28 has no match
    assert found.nearest.shape == (9, len(held))
    for place, query in enumerate(found.queries.tolist()):
        order, precision = _by_hand(embeddings, LABELS, query, held)
        assert found.nearest[place].tolist() == order
        assert found.precision[place] == pytest.approx(precision)


def test_nothing_to_find() -> None:
    found = rank(torch.eye(3), np.arange(3), np.array([""] * 3), neighbours=2)
    assert (found.queries.shape, found.nearest.shape, found.precision.shape) == ((0,), (0, 2), (0,))


def test_equals_rank_by_their_number() -> None:
    found = rank(torch.ones(300, 2), np.zeros(300, np.int64), np.array([""] * 300), neighbours=299)
    for query, nearest in enumerate(found.nearest.tolist()):
        assert nearest == [other for other in range(300) if other != query]
    assert found.precision == pytest.approx(np.ones(300))


def test_best_typical_and_worst() -> None:
    precision = np.array([0.9, 0.1, 0.5, 0.8, 0.2, 0.46, 0.7, 0.55, 0.0])  # the median is 0.5
    chosen = choose_queries(precision, np.arange(9), count=6, seed=0)
    assert chosen == {"best": [0, 3], "typical": [2, 5], "worst": [8, 1]}
    assert choose_queries(precision, np.arange(9), count=1, seed=0) == {
        "best": [0],
        "typical": [],
        "worst": [],
    }


def test_a_kind_holds_a_class_once_as_long_as_there_are_classes() -> None:
    precision = np.array([0.9, 0.8, 0.7, 0.6, 0.1, 0.0])
    chosen = choose_queries(precision, np.array([0, 0, 1, 1, 2, 2]), count=9, seed=0)
    assert chosen["best"] == [0, 2, 4]
    one_class = choose_queries(precision, np.zeros(6, np.int64), count=6, seed=0)
    assert (one_class["best"], one_class["worst"]) == ([0, 1], [5, 4])


def test_no_query_is_taken_twice_and_the_seed_draws_among_equals() -> None:
    for count in (2, 5, 50):
        chosen = choose_queries(np.ones(7), np.arange(7), count=count, seed=3)
        places = [place for kind in chosen.values() for place in kind]
        assert len(places) == len(set(places)) == min(count, 7)
    draws = [choose_queries(np.ones(40), np.arange(40), count=3, seed=seed)["best"] for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
    assert choose_queries(np.empty(0), np.empty(0, np.int64), count=3, seed=0)["best"] == []
