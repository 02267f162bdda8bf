"""The embedder: shapes, pooling against loops, pixels to network input."""

import math

import numpy as np
import pytest
import torch

from serving.errors import BadSetting
from tests.training.small import seeded
from training.method.histogram import histogram
from training.network.embedder import LEAST, Embedder, Pooling, build_embedder, generalised_mean
from training.recipes.recipe import AssignOn, PoolingName, Recipe

RECIPE = Recipe(image_size=16, dimension=12, prototypes=5)
MEAN, MEAN_AND_MAXIMUM = Pooling("gap"), Pooling("gap_gmp")


@pytest.fixture(scope="module")
def embedder() -> Embedder:
    return build_embedder(RECIPE).eval()


@pytest.fixture(scope="module")
def pixels() -> torch.Tensor:
    return torch.randint(0, 256, (3, 16, 16, 3), dtype=torch.uint8, generator=seeded(1))


def test_normalise_against_numpy(embedder: Embedder, pixels: torch.Tensor) -> None:
    expected = (pixels.numpy() / 255 - np.array(embedder.backbone.mean)) / np.array(embedder.backbone.std)
    found = embedder.normalise(pixels)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), expected.transpose(0, 3, 1, 2), atol=1e-6)


@pytest.mark.parametrize("assign_on", ["unit", "raw", "ball"])
@torch.no_grad()
def test_assignments_against_a_loop(assign_on: AssignOn) -> None:
    embedder = build_embedder(RECIPE.model_copy(update={"assign_on": assign_on}))
    embedder.codebook[0] *= 5  # a longer prototype wins more often only by raw products
    (places,) = torch.randn(1, 14, 12, generator=seeded(2))
    found = embedder.assignments(places[None])
    assert found.dtype == torch.uint8
    for place, assigned in zip(places, found[0].tolist(), strict=True):
        lengths = [prototype.norm() if assign_on == "unit" else 1 for prototype in embedder.codebook]
        scores = [float(v @ place / length) for v, length in zip(embedder.codebook, lengths, strict=True)]
        assert assigned == int(np.argmax(scores))


def test_the_start_depends_on_the_seed_alone() -> None:
    torch.manual_seed(7)
    first = build_embedder(RECIPE)
    drawn = torch.rand(1)
    torch.manual_seed(7)
    assert torch.equal(drawn, torch.rand(1))  # the global generator was left as it was
    second = build_embedder(RECIPE)
    other = build_embedder(RECIPE.model_copy(update={"seed": 1}))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.codebook, other.codebook)


@pytest.mark.parametrize(
    ("backbone", "size", "told"),
    [
        ("gmixer_12_224", 224, r"gives features of shape .*, not a map of \d+ channels; choose a conv"),
        # halves to 29, which halves unevenly
        ("bn_inception", 232, r"does not take images of 232 px \(.*\): set another image_size"),
    ],
)
def test_a_backbone_without_a_map_is_refused(backbone: str, size: int, told: str) -> None:
    with pytest.raises(BadSetting, match=told):
        build_embedder(Recipe(backbone=backbone, image_size=size))


@pytest.mark.parametrize("pooling", ["gap", "gap_gmp", "gem"])
@torch.no_grad()
def test_embeddings_are_the_head_of_the_pooled_map(pooling: PoolingName, pixels: torch.Tensor) -> None:
    embedder = build_embedder(RECIPE.model_copy(update={"pooling": pooling})).eval()
    images = embedder.normalise(pixels)
    features = embedder(images)
    maps = embedder.backbone(images)
    if pooling == "gem":
        pooled = generalised_mean(maps, 3.0)
    else:
        pooled = MEAN(maps) if pooling == "gap" else MEAN_AND_MAXIMUM(maps)
    torch.testing.assert_close(embedder.pooled(images), pooled)
    wanted = pooled @ embedder.head.weight[:, :, 0, 0].T
    torch.testing.assert_close(features.embeddings, wanted, rtol=1e-4, atol=1e-5)
    assert (features.locations.shape, embedder.grid) == ((3, 16, 12), (4, 4))
    shares = histogram(features.locations, embedder.codebook, assignment_scale=60.0, assign_on="unit")
    torch.testing.assert_close(features.histograms, shares)
    # locations and histograms are the same whatever the pooling
    plain = build_embedder(RECIPE).eval()(images)
    assert torch.equal(features.locations, plain.locations)
    assert torch.equal(features.histograms, plain.histograms)
    assert (pooling == "gap") == torch.equal(features.embeddings, features.locations.mean(dim=1))


def test_poolings_against_a_loop() -> None:
    maps = torch.randn(2, 3, 4, 5, dtype=torch.float64, generator=seeded())
    average, both = MEAN(maps).flatten().tolist(), MEAN_AND_MAXIMUM(maps).flatten().tolist()
    for i, channel in enumerate(maps.flatten(0, 1)):
        values = channel.flatten().tolist()
        assert average[i] == pytest.approx(sum(values) / 20, abs=1e-12)
        assert both[i] == pytest.approx(sum(values) / 20 + max(values), abs=1e-12)
        for exponent in (3.0, 1.0, 0.5, -2.0):
            found = generalised_mean(maps, exponent).flatten()[i].item()
            powers = [max(value, LEAST) ** exponent for value in values]
            assert found == pytest.approx((sum(powers) / 20) ** (1 / exponent), rel=1e-9)


def test_generalised_mean_of_large_features_is_finite() -> None:
    maps = torch.tensor([1e30, 2e30]).view(1, 1, 1, 2)  # their cubes are not float32
    assert generalised_mean(maps, 3.0).item() == pytest.approx(1e30 * math.cbrt(4.5), rel=1e-5)
    assert generalised_mean(maps.to(torch.bfloat16), 3.0).dtype == torch.float32
