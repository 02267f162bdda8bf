"""What a report looks at: embeddings, histograms, prototypes, figures."""

from pathlib import Path

import numpy as np
import pytest
import torch

from serving.catalog.catalog import Row
from serving.catalog.picture import File
from serving.errors import BadData
from tests.training.drawn import draw_folder
from training.data.pictures import Stream, viewing_decoder
from training.evaluation.metrics import retrieval_metrics
from training.network.embedder import build_embedder
from training.recipes.recipe import Recipe
from training.report.findings import Findings, embed_split, find_assignments, measure

RECIPE = Recipe(image_size=16, dimension=8, prototypes=4)


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
    torch.testing.assert_close(found.embeddings, features.embeddings)
    torch.testing.assert_close(torch.from_numpy(found.histograms), features.histograms)


@torch.no_grad()
def test_the_dominant_prototype_of_each_place(rows: list[Row]) -> None:
    embedder = build_embedder(RECIPE).eval()
    kept, found = find_assignments([rows[3], *rows[:3]], embedder, RECIPE)
    assert [row.key for row in kept] == [row.key for row in rows[:3]]
    for image, pixels in enumerate(Stream(kept, viewing_decoder(RECIPE))):
        locations = embedder(embedder.normalise(torch.from_numpy(pixels.copy())[None])).locations[0]
        for place, location in enumerate(locations):
            cosines = [float(torch.cosine_similarity(location, one, dim=0)) for one in embedder.codebook]
            assert found[image, place] == np.argmax(cosines)
    assert find_assignments(rows[3:], embedder, RECIPE)[0] == ()


def test_roles_are_those_of_the_data_sets_own_test(rows: list[Row]) -> None:
    asked = [Row(row.key, row.image, row.label, "query") for row in rows]
    embedder = build_embedder(RECIPE).eval()
    given = RECIPE.model_copy(update={"split_by": "given"})
    assert embed_split(asked, embedder, given, batch=2).roles.tolist() == ["query"] * 3
    assert embed_split(asked, embedder, RECIPE, batch=2).roles.tolist() == [""] * 3
    assert embed_split(asked, embedder, given, batch=2, split="all").roles.tolist() == [""] * 3


def test_a_data_set_that_keeps_queries_apart() -> None:
    rng = torch.Generator().manual_seed(0)
    embeddings, labels = torch.randn(12, 4, generator=rng), np.arange(12) % 3
    roles = np.array(["query", "gallery", "gallery", "gallery"] * 3)
    rows = tuple(Row(str(i), File(Path("x")), str(label), str(roles[i])) for i, label in enumerate(labels))
    histograms = np.full((12, 2), 0.5, np.float32)
    findings = Findings(rows, (), ("0", "1", "2"), labels, roles, embeddings, histograms)
    asking, held = roles == "query", roles == "gallery"
    expected = retrieval_metrics(
        embeddings[asking],
        labels[asking],
        gallery_embeddings=embeddings[held],
        gallery_labels=labels[held],
    )
    found = measure(findings)
    assert (found["map_at_r"], found["queries"]) == (expected.map_at_r, 3)
    alone = Findings(rows, (), ("0", "1", "2"), labels, np.array(["query"] * 12), embeddings, histograms)
    with pytest.raises(BadData, match="12 images are queries and none is of a gallery"):
        measure(alone)
