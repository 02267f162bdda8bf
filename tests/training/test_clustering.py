"""NMI and AMI against the naive sums, for perfect, random and degenerate partitions."""

import numpy as np
import pytest
import torch

from tests import oracles
from training.evaluation.clustering import agreement, cluster_figures


@pytest.mark.parametrize("seed", range(6))
def test_figures_are_the_naive_sums(seed: int) -> None:
    rng = np.random.default_rng(seed)
    clusters, labels = rng.integers(0, 3, 6), rng.integers(0, 3, 6)
    clusters[:2], labels[:2] = (0, 1), (0, 1)  # two of each at least, so that there is an entropy
    nmi, ami = agreement(clusters, labels)
    assert nmi == pytest.approx(oracles.normalised_information(clusters, labels), abs=1e-9)
    assert ami == pytest.approx(oracles.adjusted_information(clusters, labels), abs=1e-9)


def test_perfect_and_random_partitions() -> None:
    labels = np.arange(300) % 30
    assert agreement((labels * 7 + 3) % 30, labels) == pytest.approx((1, 1))
    nmi, ami = agreement(np.random.default_rng(0).permutation(labels), labels)
    assert nmi > 0.3  # which is why AMI is told beside it
    assert abs(ami) < 0.1


def test_separate_classes_are_found_whatever_the_length_of_an_embedding() -> None:
    rng = np.random.default_rng(1)
    labels = np.repeat(np.arange(5), 12)
    embeddings = (np.eye(5)[labels] + 0.02 * rng.normal(size=(60, 5))) * rng.uniform(0.1, 50, (60, 1))
    found = cluster_figures(torch.from_numpy(embeddings).half(), labels + 2**24)
    assert found == pytest.approx({"nmi": 1, "ami": 1})


def test_the_same_seed_finds_the_same_clusters() -> None:
    embeddings = torch.randn(80, 3, generator=torch.Generator().manual_seed(0))
    labels = np.arange(80) % 8
    assert cluster_figures(embeddings, labels, seed=5) == cluster_figures(embeddings, labels, seed=5)
    assert cluster_figures(embeddings, labels, seed=5) != cluster_figures(embeddings, labels, seed=6)


def test_fewer_distinct_embeddings_than_classes() -> None:
    embeddings = torch.eye(2).repeat(10, 1)
    assert cluster_figures(embeddings, np.arange(20) % 2) == pytest.approx({"nmi": 1, "ami": 1})
    found = cluster_figures(embeddings, np.arange(20) % 4)
    assert found["nmi"] == pytest.approx(2 / 3)  # two clusters of two classes each: I = log 2, H = 1.5 log 2
