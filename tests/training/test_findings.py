"""What a report looks at: embeddings, histograms, prototypes, figures, neighbours, a plane."""

import numpy as np
import pytest
import torch

from serving.catalog.catalog import Row
from serving.catalog.picture import File
from tests import oracles
from tests.training.small import draw_folder
from training.data.pictures import Stream, viewing_decoder
from training.network.embedder import build_embedder
from training.recipes.recipe import Recipe
from training.report import findings
from training.report.findings import Findings, choose_queries, embed_split, project, rank

RECIPE = Recipe(image_size=16, dimension=8, prototypes=4)
LABELS = [i % 4 for i in range(28)] + [4, 5]  # two are alone in their class


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    """Three images of two classes, of which a third is not there."""
    root = draw_folder(tmp_path_factory.mktemp("data"), classes=2, images=2, size=18)
    found = [
        Row(f"{path.parent.name}/{path.name}", File(path), path.parent.name)
        for path in sorted(root.rglob("*.png"))
    ]
    return [*found[:3], Row("gone", File(root / "gone"), "zz", "query")]


@torch.no_grad()
def test_images_as_the_embedder_sees_them(rows: list[Row]) -> None:
    embedder = build_embedder(RECIPE).eval()
    found = embed_split(rows, embedder, RECIPE, batch=2)
    assert [row.key for row in found.rows] == [row.key for row in rows[:3]]
    assert [bad.key for bad in found.unreadable] == ["gone"]
    assert (found.classes, found.labels.tolist()) == (("class00", "class01"), [0, 0, 1])
    pixels = torch.from_numpy(np.stack(list(Stream(rows, viewing_decoder(RECIPE)))))
    features = embedder(embedder.normalise(pixels))
    torch.testing.assert_close(torch.from_numpy(found.embeddings), features.embeddings)
    torch.testing.assert_close(torch.from_numpy(found.histograms), features.histograms)
    before, start = found.before(), build_embedder(RECIPE).eval()
    assert before is not None
    torch.testing.assert_close(torch.from_numpy(before.embeddings), start.pooled(start.normalise(pixels)))
    assert (before.rows, before.before()) == (found.rows, None)

    kept, maps = findings.find_assignments([rows[3], *rows[:3]], embedder, RECIPE)
    assert [row.key for row in kept] == [row.key for row in rows[:3]]
    cosines = torch.cosine_similarity(features.locations[:, :, None], embedder.codebook, dim=-1)
    np.testing.assert_array_equal(maps, cosines.argmax(dim=-1).view(3, *embedder.grid))
    assert findings.find_assignments(rows[3:], embedder, RECIPE)[0] == ()


def test_roles_are_those_of_the_data_sets_own_test(rows: list[Row]) -> None:
    asked = [Row(row.key, row.image, row.label, "query") for row in rows]
    embedder = build_embedder(RECIPE).eval()
    given = RECIPE.model_copy(update={"split_by": "given"})
    assert embed_split(asked, embedder, given, batch=2).roles == ["query"] * 3
    assert embed_split(asked, embedder, RECIPE, batch=2).roles is None
    assert embed_split(asked, embedder, given, batch=2, split="all").roles is None


def _findings(embeddings: np.ndarray, labels: np.ndarray, roles: list[str] | None = None) -> Findings:
    return Findings((), (), (), labels, roles, embeddings.astype(np.float32), np.empty((0, 0), np.float32))


def test_mean_histograms_by_hand() -> None:
    histograms = np.random.default_rng(0).dirichlet(np.ones(5), 20).astype(np.float32)
    found = findings.class_histograms(histograms, np.arange(20) % 3, 3)
    expected = [np.mean([histograms[i] for i in range(c, 20, 3)], axis=0) for c in range(3)]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("apart", [False, True])
def test_each_query_by_hand(apart: bool) -> None:
    """Each query's references from near to far, and AP@R of these alone."""
    embeddings, labels = np.random.default_rng(1).normal(size=(30, 5)), np.array(LABELS)
    held = list(range(30))
    roles = ["query", "gallery", "gallery"] * 9 + ["train", "query", "gallery"] if apart else None
    asked = held[:28]  # 28 and 29 have no match
    if roles:
        asked, held = held[:27:3], [i for i in held if roles[i] == "gallery"]
    found = rank(_findings(embeddings, labels, roles), neighbours=100 if apart else 6)
    assert found.queries.tolist() == asked
    assert found.nearest.shape == (len(asked), len(held) if apart else 6)
    assert (np.diff(found.similarity, axis=1) <= 0).all()
    for place, query in enumerate(asked):
        others = np.array([j for j in held if j != query])
        references = embeddings[others]
        order = others[np.argsort([-oracles.cosine(embeddings[query], other) for other in references])]
        assert found.nearest[place].tolist() == order[: found.nearest.shape[1]].tolist()
        told = oracles.retrieval(embeddings[[query]], labels[[query]], (), references, labels[others])
        assert found.precision[place] == pytest.approx(told[1])


def test_best_typical_and_worst() -> None:
    precision = np.array([0.9, 0.1, 0.5, 0.8, 0.2, 0.46, 0.7, 0.55, 0.0])  # the median is 0.5
    chosen = choose_queries(precision, np.arange(9), count=6, seed=0)
    assert chosen == {"best": [0, 3], "typical": [2, 5], "worst": [8, 1]}
    one = choose_queries(precision, np.arange(9), count=1, seed=0)
    assert one == {"best": [0], "typical": [], "worst": []}
    precision = np.array([0.9, 0.8, 0.7, 0.6, 0.1, 0.0])  # a class once as long as there are classes
    assert choose_queries(precision, np.array([0, 0, 1, 1, 2, 2]), count=9, seed=0)["best"] == [0, 2, 4]
    one_class = choose_queries(precision, np.zeros(6, np.int64), count=6, seed=0)
    assert (one_class["best"], one_class["worst"]) == ([0, 1], [5, 4])


def test_no_query_is_taken_twice_and_the_seed_draws_among_equals() -> None:
    for count in (2, 5, 50):
        chosen = choose_queries(np.ones(7), np.arange(7), count=count, seed=3)
        places = [place for kind in chosen.values() for place in kind]
        assert len(places) == len(set(places)) == min(count, 7)
    draws = [choose_queries(np.ones(40), np.arange(40), count=3, seed=seed)["best"] for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]


@pytest.mark.parametrize("shape", [(40, 6), (6, 40), (2, 3), (3, 2)])
def test_principal_components_of_unit_vectors(shape: tuple[int, int]) -> None:
    vectors = np.random.default_rng(0).normal(size=shape) * 7 + 1
    points, shares = project(vectors)
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    u, s, axes = np.linalg.svd(unit - unit.mean(axis=0), full_matrices=False)
    for axis in range(2):
        share = s[axis] ** 2 / (s**2).sum()
        assert shares[axis] == pytest.approx(share, abs=1e-9)
        if share > 1e-9:
            sign = np.sign(axes[axis][np.abs(axes[axis]).argmax()])
            np.testing.assert_allclose(points[:, axis], sign * s[axis] * u[:, axis], atol=1e-7)
        else:
            np.testing.assert_allclose(points[:, axis], 0, atol=1e-6)
    points, shares = project(np.ones((5, 3), np.float32))
    assert (shares, points.tolist()) == ((0, 0), [[0, 0]] * 5)
