"""Cached features of a frozen backbone: what is in them, when they are made anew, and training on them."""

import shutil
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from serving.catalog.catalog import Row, read
from serving.errors import BadSetting
from tests.training.small import SMALL, cut_at, draw_folder, equal_runs
from training.data import feature_cache
from training.data.feature_cache import cache_features, feature_batches, find_features
from training.data.pictures import Stream, embed_pictures, viewing_decoder
from training.evaluation.evaluate import Settings as Evaluate
from training.evaluation.evaluate import run as evaluate
from training.loop.run import load_run
from training.network.embedder import Embedder, build_embedder, embedder_function
from training.recipes.recipe import Recipe, make_recipe
from training.recipes.recipe_file import parse_yaml
from training.train import Settings, run

FROZEN = SMALL.replace("ema_decay: 0.9\n", "") + "freeze: backbone\nviews: 3\nepochs: 2\n"


@pytest.fixture(scope="module")
def small() -> Recipe:
    return make_recipe(parse_yaml(FROZEN), source="small")


@pytest.fixture(scope="module")
def embedder(small: Recipe) -> Embedder:
    return build_embedder(small)


@pytest.fixture
def rows(tmp_path: Path) -> tuple[Row, ...]:
    return read(draw_folder(tmp_path / "pictures", classes=3, images=2, size=18)).rows


@pytest.fixture
def given(rows: tuple[Row, ...], small: Recipe, embedder: Embedder, tmp_path: Path) -> dict[str, Any]:
    """What the features of the six images are asked for by."""
    return {"rows": rows, "embedder": embedder, "recipe": small, "views": 3, "folder": tmp_path}


def test_the_first_view_is_what_the_served_model_sees(embedder: Embedder, given: dict[str, Any]) -> None:
    found = cache_features(**given)
    assert (len(found), found.views, found.locations) == (6, 3, embedder.grid[0] * embedder.grid[1])
    cached = embed_pictures(embedder_function(embedder, mapped=True), found)
    direct = embed_pictures(
        embedder_function(embedder), Stream(given["rows"], viewing_decoder(given["recipe"]))
    )
    np.testing.assert_allclose(cached, direct, atol=1e-2, rtol=1e-2)  # float16
    every = np.arange(found.locations)
    views = [found.draw(np.array([0]), np.array([view]), every) for view in range(3)]
    assert not torch.equal(views[0], views[1])
    assert not torch.equal(views[1], views[2])


def test_it_is_made_once_for_the_same_images_and_settings(
    rows: tuple[Row, ...], small: Recipe, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    extract = MagicMock(side_effect=feature_cache._extract)
    monkeypatch.setattr(feature_cache, "_extract", extract)
    cache_features(**given)
    for changes in ({"seed": 5, "loss": "triplet", "location_share": 0.5}, {"flip": 0.2}, {"shear": 2.0}):
        cache_features(**given | {"recipe": small.model_copy(update=changes)})
    assert len(list((given["folder"] / "features").iterdir())) == extract.call_count == 3
    rows[0].image.path.write_bytes(rows[1].image.read_bytes())
    cache_features(**given)
    assert extract.call_count == 4


def test_a_cut_extraction_is_made_anew(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(feature_cache, "_maps", MagicMock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            cache_features(**given)
    assert list((given["folder"] / "features").iterdir()) == []
    assert len(cache_features(**given)) == 6


@pytest.mark.parametrize("name", ["features.npy", "index.json"])
@pytest.mark.parametrize("left", [0, 9, None])
def test_a_damaged_cache_is_made_anew(given: dict[str, Any], name: str, left: int | None) -> None:
    cache_features(**given)
    (file,) = (given["folder"] / "features").glob(f"*/{name}")
    if left is None:
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:left])
    assert find_features(**given) is None
    assert len(cache_features(**given)) == 6


def test_unreadable_images_stay_out_from_the_cache_too(rows: tuple[Row, ...], given: dict[str, Any]) -> None:
    rows[2].image.path.write_bytes(b"no image")
    for _ in range(2):
        found = cache_features(**given)
        assert [bad.key for bad in found.unreadable] == [rows[2].key]
        assert [row.key for row in found.rows] == [row.key for row in rows if row != rows[2]]
        some = found.only(rows[:4])
        assert [row.key for row in some.rows] == [rows[0].key, rows[1].key, rows[3].key]
        assert len(some.unreadable) == 1


def test_a_cache_that_is_too_large_is_refused(small: Recipe, given: dict[str, Any]) -> None:
    with pytest.raises(BadSetting, match=r"features of 6 images, 3 views .* GiB, but cache_gib is 1e-09"):
        cache_features(**given | {"recipe": small.model_copy(update={"cache_gib": 1e-9})})
    assert not (given["folder"] / "features").exists()


def test_batches_hold_the_same_places(small: Recipe, embedder: Embedder, given: dict[str, Any]) -> None:
    found = cache_features(**given)

    def deal(epoch: int = 0, xml_weight: float = 0.1, **more: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        recipe = small.model_copy(update={"seed": 1, "location_share": 0.5, "xml_weight": xml_weight})
        return list(feature_batches(found, [[0, 3, 4, 5], [1, 2]], recipe, epoch=epoch, **more))

    whole = deal()
    channels, half = embedder.backbone.channels, round(0.5 * found.locations)
    assert [maps.shape for maps, _ in whole] == [(4, channels, half, 1), (2, channels, half, 1)]
    assert whole[0][1].tolist() == [0, 1, 2, 2]
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(whole, deal(), strict=True))
    assert not torch.equal(whole[0][0], deal(epoch=1)[0][0])
    means = deal(xml_weight=0)  # nothing then looks at single places
    torch.testing.assert_close(means[0][0][:, :, 0, 0], whole[0][0].float().mean(dim=(2, 3)))
    second = deal(mine=lambda rows: rows[len(rows) // 2 :])
    assert torch.equal(second[0][0], whole[0][0][2:])


def test_a_head_trains_on_the_cache_and_goes_on_where_it_was_cut(data: Path, tmp_path: Path) -> None:
    recipe, cache = tmp_path / "frozen.yaml", tmp_path / "cache"
    recipe.write_text(FROZEN + "head_init: whiten_within\ncodebook_init: k_centre\n")
    told = run(Settings(recipe=str(recipe), data=data, out=tmp_path / "whole", cache=cache))
    trained = load_run(tmp_path / "whole")
    start = build_embedder(trained.recipe)
    for name, value in trained.embedder.backbone.state_dict().items():
        assert torch.equal(value, start.backbone.state_dict()[name]), name
    measured = evaluate(Evaluate(target=tmp_path / "whole", split="train"))
    assert told["best"]["map_at_r"] == trained.record["metrics"]["validation"]["map_at_r"]
    assert measured["images"] == told["images"] + told["validation_images"]
    with cut_at(3):
        run(Settings(recipe=str(recipe), data=data, out=tmp_path / "cut", cache=cache))
    shutil.rmtree(cache)
    run(Settings(out=tmp_path / "cut", resume=True, cache=cache))
    equal_runs(tmp_path / "whole", tmp_path / "cut")
