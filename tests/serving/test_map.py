"""The map of a gallery: places by PCA and UMAP, written beside other writers, and the tiles that show it."""

import json
import sys
from contextlib import closing
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import crossbatch
from protos import gallery_service_pb2 as pb
from serving.errors import BadSetting, Mismatch
from serving.gallery import map as maps
from serving.gallery.directory import GalleryDirectory
from serving.gallery.gallery import Gallery, GalleryItem
from serving.gallery.item import JPEG, MAX_METADATA_BYTES, ItemChange, Source
from serving.gallery.map import MapReport, make_map, on_square, principal_axes
from serving.gallery.search import tile as tiles
from serving.gallery.search.tile import Tile, map_tile
from tests.serving.indexed import index
from tests.serving.stubs import Stubs, item, refusal_of
from tests.serving.vectors import AXES, MANUAL, MODEL, clustered, created, units


def places(gallery: Gallery) -> dict[str, tuple[float, float]]:
    return {it.key: (it.metadata["map_x"], it.metadata["map_y"]) for it in gallery.list(limit=1000)}


def tile(gallery: Gallery, zoom: int = 0, column: int = 0, row: int = 0, field: str = "") -> Tile:
    with gallery.reading() as (snapshot, reader):
        return map_tile(snapshot, reader, zoom, column, row, field)


def at(*points: tuple[float, float]) -> list[GalleryItem]:
    vectors = units(len(points), 4)
    return [
        GalleryItem(f"k{i}", vectors[i], metadata={"map_x": x, "map_y": y}) for i, (x, y) in enumerate(points)
    ]


@pytest.mark.parametrize(("count", "dimension"), [(300, 16), (40, 2), (5, 9), (3, 3)])
def test_the_axes_are_those_of_the_singular_values(count: int, dimension: int) -> None:
    rows = clustered(count, dimension)
    mean, axes = principal_axes([rows[:2], rows[2:]], dimension)
    wide = rows.astype(np.float64)
    assert mean == pytest.approx(wide.mean(axis=0), abs=1e-12)
    expected = np.linalg.svd(wide - wide.mean(axis=0))[2][:2].T  # (d, 2)
    assert np.abs((axes * expected).sum(axis=0)) == pytest.approx([1, 1], abs=1e-9)
    assert (axes[np.abs(axes).argmax(axis=0), [0, 1]] > 0).all()
    assert axes.T @ axes == pytest.approx(np.eye(2), abs=1e-9)


@given(
    st.lists(st.tuples(*[st.floats(-1e3, 1e3)] * 2), min_size=1, max_size=40).map(np.array),
    st.floats(1e2, 1e6),
)
def test_places_are_scaled_into_a_square_in_their_order(flat: NDArray[np.float64], far: float) -> None:
    scaled = on_square(flat)
    assert ((scaled >= 0) & (scaled <= 1)).all()
    for axis in (0, 1):
        assert (np.diff(scaled[np.argsort(flat[:, axis], kind="stable"), axis]) >= 0).all()
    spread = np.ptp(flat, axis=0)
    wide = int(np.argmax(spread))
    if spread[wide] > 1e-3:
        assert np.ptp(scaled[:, wide]) > 0.9
    many = np.concatenate([np.random.default_rng(0).random((2000, 2)), [[far, 0.5]]])
    room = np.ptp(on_square(many)[:2000], axis=0)
    assert room == pytest.approx([0.95, 0.95], abs=0.05)  # one that is far away squeezes nobody


def test_both_axes_have_one_scale_and_the_middle_is_that_of_the_map() -> None:
    flat = np.random.default_rng(0).random((5000, 2)) * [4, 1] + [70, -9]
    inner = (np.abs(flat - [72, -8.5]) < [1.9, 0.4]).all(axis=1)
    for order in ([0, 1], [1, 0]):  # whichever of them is the wider
        scaled = on_square(flat[:, order])[:, order]
        factors = [np.polyfit(flat[inner, axis], scaled[inner, axis], 1)[0] for axis in (0, 1)]
        assert factors == pytest.approx([0.95 / 4] * 2, rel=0.01)
        assert np.median(scaled, axis=0) == pytest.approx([0.5, 0.5], abs=0.02)


@pytest.mark.parametrize("rows", [AXES[:1], AXES[[0, 0]], np.repeat(units(1, 4), 9, axis=0)])
def test_what_does_not_differ_lies_in_the_middle(tmp_path: Path, rows: NDArray[np.float32]) -> None:
    gallery = created(tmp_path / "g")
    assert make_map(gallery) == MapReport("pca", 0, 0, 0)
    gallery.upsert([GalleryItem(f"{i}", row) for i, row in enumerate(rows)])
    assert make_map(gallery) == MapReport("pca", len(rows), len(rows), 0)
    assert set(places(gallery).values()) == {(0.5, 0.5)}
    assert on_square(np.array([[3, 0], [3 + 1e-12, 0]])) == pytest.approx(0.5, abs=1e-5)  # but for rounding
    gallery.close()


@pytest.mark.parametrize("dimension", [1, 2])
def test_short_vectors_have_a_map(tmp_path: Path, dimension: int) -> None:
    gallery = created(tmp_path / "g", dimension)
    rows = np.eye(dimension, dtype=np.float32)
    gallery.upsert([GalleryItem(f"{i}", row) for i, row in enumerate([*rows, *-rows])])
    make_map(gallery)
    found = places(gallery)
    assert len(set(found.values())) == 2 * dimension
    for i in range(dimension):  # what is opposite lies opposite
        both = np.array([found[f"{i}"], found[f"{i + dimension}"]])
        assert both.sum(axis=0) == pytest.approx([1, 1], abs=1e-5)
    gallery.close()


def test_all_else_of_the_items_stays_and_only_what_moves_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maps, "_ROWS", 32)
    monkeypatch.setattr(maps, "_AT_ONCE", 7)
    gallery = created(tmp_path / "g", 16, thumbnail_side=64)
    rows = clustered(200, 16)
    source = Source("photos", 3, 4, bytes(32))
    items = [
        GalleryItem(f"k{i:03}", row, f"l{i % 3}", f"{i}.jpg", {"n": i}, source, JPEG + bytes([i]))
        for i, row in enumerate(rows)
    ]
    gallery.upsert(items[:120])
    gallery.rebuild()
    gallery.upsert(items[120:])
    gallery.delete(["k003", "k150"])
    steps: list[tuple[str, int, int]] = []
    assert make_map(gallery, progress=lambda *step: steps.append(step)) == MapReport("pca", 198, 198, 0)
    assert [step for step in steps if step[1] == step[2]] == [
        ("axes", 198, 198), ("places", 198, 198), ("write", 198, 198)
    ]  # fmt: skip
    found = gallery.find([it.key for it in items], thumbnails=True)
    assert found.keys() == {it.key for it in items} - {"k003", "k150"}
    for it in items:
        if now := found.get(it.key):
            assert {**now.metadata, "map_x": 0, "map_y": 0} == {"n": it.metadata["n"], "map_x": 0, "map_y": 0}
            assert np.array_equal(now.vector, it.vector)
            assert (now.label, now.uri, now.thumbnail) == (it.label, it.uri, it.thumbnail)
            assert now.source is not None
            assert replace(now.source, given="") == source
    left = np.delete(rows.astype(np.float64), [3, 150], axis=0)
    basis = np.linalg.svd(left - left.mean(axis=0))[2][:2].T
    flat = (left - left.mean(axis=0)) @ basis
    written = np.array([place for _, place in sorted(places(gallery).items())])
    correlation = np.corrcoef(np.concatenate([flat, written], axis=1).T)[:2, 2:]
    assert np.abs(correlation).round(2).tolist() == [[1, 0], [0, 1]]
    versions = {key: it.version for key, it in gallery.find(list(found)).items()}
    gallery.rebuild()
    assert make_map(gallery) == MapReport("pca", 198, 0, 0)
    shifts, before = {"k002": 0.002, "k004": 0.0005}, places(gallery)
    gallery.update([ItemChange("k000", {"map_x": "far"}), ItemChange("k001", {"map_y": None})])
    gallery.update([ItemChange(key, {"map_y": before[key][1] + by}) for key, by in shifts.items()])
    versions["k004"] = gallery.get(["k004"])[0].version
    assert make_map(gallery) == MapReport("pca", 198, 3, 0)
    changed = {key for key, it in gallery.find(list(found)).items() if it.version != versions[key]}
    assert changed == {"k000", "k001", "k002"}
    gallery.close()


def test_who_writes_meanwhile_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gallery, real = created(tmp_path / "g"), Gallery.update
    rows = units(40, 4)
    gallery.upsert([GalleryItem(f"k{i:02}", row, metadata={"n": i}) for i, row in enumerate(rows)])
    gallery.update([ItemChange("k30", {"full": "x" * (MAX_METADATA_BYTES - 30)})])
    meanwhile = count()

    def update(self: Gallery, *args: Any, **options: Any) -> list[int]:
        match next(meanwhile):
            case 1:  # the first half, since one item in the other has no room
                real(self, [ItemChange("k05", {"price": 3})])
                self.upsert([GalleryItem("k06", rows[0], "another"), GalleryItem("new", rows[1])])
            case 2:
                self.delete(["k07", "k08"])
        return real(self, *args, **options)

    monkeypatch.setattr(Gallery, "update", update)
    assert make_map(gallery) == MapReport("pca", 35, 35, 5)
    monkeypatch.undo()
    assert gallery.get(["k05"])[0].metadata == {"n": 5, "price": 3}
    assert (gallery.get(["k06"])[0].label, gallery.get(["k06"])[0].metadata) == ("another", {})
    assert gallery.find(["k07", "k08"]) == {}
    assert "map_x" not in gallery.get(["k30"])[0].metadata
    assert make_map(gallery).items == 38  # again, without the one that has no room
    gallery.close()


class FakeUmap:
    """Tells where it was given what, and places each vector by its first two components."""

    fitted: int

    def __init__(self, **options: Any) -> None:
        assert options["random_state"] == 0

    def fit_transform(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        FakeUmap.fitted = len(rows)
        return rows[:, :2]

    def transform(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        return rows[:, :2]


def test_a_map_by_umap_is_fitted_to_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gallery, rows = created(tmp_path / "g"), units(100, 4)
    gallery.upsert([GalleryItem(f"k{i:03}", row) for i, row in enumerate(rows[:9])])
    monkeypatch.setitem(sys.modules, "umap", None)
    with pytest.raises(BadSetting, match=r"pip install 'crossbatch\[map\]'"):
        make_map(gallery, "umap")
    monkeypatch.setitem(sys.modules, "umap", SimpleNamespace(UMAP=FakeUmap))
    assert make_map(gallery, "umap").method == "pca"
    gallery.upsert([GalleryItem(f"k{i:03}", row) for i, row in enumerate(rows)])
    monkeypatch.setattr(maps, "_FITTED", 30)
    monkeypatch.setattr(maps, "_ROWS", 32)
    assert make_map(gallery, "umap") == MapReport("umap", 100, 100, 0)
    assert FakeUmap.fitted == 30
    written = np.array([place for _, place in sorted(places(gallery).items())])
    assert written == pytest.approx(on_square(rows[:, :2].astype(np.float64)), abs=1e-6)
    gallery.close()


def test_vectors_too_long_for_pca_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gallery = created(tmp_path / "g")
    gallery.upsert([GalleryItem("a", AXES[0])])
    monkeypatch.setattr(maps, "_MOST_DIMENSION", 3)
    with pytest.raises(BadSetting, match="have 4 components"):
        make_map(gallery)
    gallery.close()


_UNIT = st.one_of(st.floats(0, 1), st.integers(0, 8).map(lambda eighth: eighth / 8))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(_UNIT, _UNIT), min_size=1, max_size=60), st.integers(0, 60), st.integers(0, 60))
def test_tiles_part_the_items_and_deeper_ones_leave_nothing_out(
    tmp_path_factory: pytest.TempPathFactory,
    points: list[tuple[float, float]],
    indexed: int,
    deleted: int,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "MAX_POINTS", 5)
        gallery, items = created(tmp_path_factory.mktemp("map") / "g"), at(*points)
        gallery.upsert(items[:indexed])
        gallery.rebuild()
        gallery.upsert([*items[indexed:], GalleryItem("nowhere", AXES[0], metadata={"map_x": 2, "map_y": 0})])
        gallery.delete([f"k{i}" for i in range(1, len(points)) if i < deleted])
        alive = {f"k{i}": points[i] for i in range(len(points)) if i == 0 or i >= deleted}
        above: dict[tuple[int, int], set[str]] = {}
        for zoom in range(4):
            seen: dict[tuple[int, int], set[str]] = {}
            total = 0
            for column in range(1 << zoom):
                for row in range(1 << zoom):
                    found = tile(gallery, zoom, column, row)
                    keys = seen[column, row] = set(found.keys)
                    total += found.items
                    assert len(found.keys) == len(keys) == min(5, found.items)
                    for key, place in zip(found.keys, found.points.tolist(), strict=True):
                        assert place == pytest.approx(alive[key], abs=1e-7)
                        for value, tile_at in zip(place, (column, row), strict=True):
                            assert min(int(value * (1 << zoom)), (1 << zoom) - 1) == tile_at
            assert total == len(alive)
            for (column, row), keys in above.items():
                below = [seen[2 * column + i, 2 * row + j] for i in (0, 1) for j in (0, 1)]
                assert keys <= set[str]().union(*below)
            above = seen
        gallery.close()


def test_points_are_the_same_after_a_rebuild_and_follow_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "MAX_POINTS", 20)
    gallery = created(tmp_path / "g")
    with pytest.raises(Mismatch, match="crossbatch gallery map g"):
        tile(gallery)
    gallery.upsert(
        [GalleryItem("a", AXES[0]), GalleryItem("b", AXES[1], metadata={"map_x": 1, "map_y": "y"})]
    )
    with pytest.raises(Mismatch):
        tile(gallery)
    grid = [(x / 16 + 0.03, y / 16 + 0.03) for x in range(16) for y in range(16)]
    gallery.upsert(at(*grid))
    first = tile(gallery)
    assert (first.items, len(first.keys)) == (256, 20)
    gallery.rebuild()
    again = tile(gallery)
    assert (again.keys, again.points.tolist()) == (first.keys, first.points.tolist())
    quarters = np.floor(first.points * 2).astype(int)
    assert len({*map(tuple, quarters.tolist())}) == 4  # some from everywhere
    gallery.delete(first.keys[:3])
    assert tile(gallery).keys[:17] == first.keys[3:]
    assert tile(gallery).items == 253
    gallery.update([ItemChange(first.keys[5], {"map_x": None})])
    gallery.upsert([GalleryItem("last", AXES[0], metadata={"map_x": 1.0, "map_y": 1})])
    assert tile(gallery).items == 253
    assert tile(gallery, 20, (1 << 20) - 1, (1 << 20) - 1).keys == ["last"]
    assert tile(gallery, 20, 0, 0).items == 0
    gallery.close()


def get_tile(stubs: Stubs, **options: Any) -> pb.GetMapTileResponse:
    request = pb.GetMapTileRequest(**({"gallery": "birds"} | options))
    reply: pb.GetMapTileResponse = stubs.galleries.GetMapTile(request, timeout=10)
    return reply


def test_a_tile_is_coloured_by_the_values_of_a_field(stubs: Stubs) -> None:
    stubs.create("birds")
    said = refusal_of(lambda: get_tile(stubs), "FAILED_PRECONDITION", reason="MISMATCH")
    assert "crossbatch gallery map birds" in said
    held: dict[str, tuple[Any, str]] = {
        "a": ("wren", "wren"), "b": (3, "3"), "c": (2.5, "2.5"), "d": (True, "true"), "e": (None, ""),
        "f": (["x", "y"], "x"), "g": ([], ""), "h": ({"x": 1}, ""), "i": ("é" * 300, "é" * 200),
    }  # fmt: skip
    for i, (key, (value, _)) in enumerate(held.items()):
        placed = item(key, label=f"l{i % 2}" if i else "")
        placed.metadata.update({"kind": value, "map_x": i / 10, "map_y": 1 - i / 10})
        stubs.upsert("birds", placed)
    reply = get_tile(stubs, field="kind")
    values = [reply.values[at] for at in np.frombuffer(reply.value_of, "<u2")]
    assert dict(zip(reply.keys, values, strict=True)) == {key: told for key, (_, told) in held.items()}
    assert list(reply.values) == sorted({told for _, told in held.values()})
    points = dict(zip(reply.keys, np.frombuffer(reply.points, "<f4").reshape(-1, 2).tolist(), strict=True))
    assert points["c"] == pytest.approx([0.2, 0.8])
    assert reply.items == 9
    labels = get_tile(stubs, field="$label")
    assert list(labels.values) == ["", "l0", "l1"]
    assert labels.keys == reply.keys
    plain = get_tile(stubs, zoom=1, column=0, row=1)
    assert set(plain.keys) == {"a", "b", "c", "d", "e"}
    assert (list(plain.values), plain.value_of) == ([], b"")
    none = get_tile(stubs, zoom=1, column=0, row=0, field="kind")
    assert (none.items, list(none.keys), none.points) == (0, [], b"")
    assert list(get_tile(stubs, field="nothing").values) == [""]
    refusal_of(lambda: get_tile(stubs, zoom=21), "INVALID_ARGUMENT", "zoom")
    refusal_of(lambda: get_tile(stubs, zoom=1, column=2), "INVALID_ARGUMENT", "column")
    refusal_of(lambda: get_tile(stubs, zoom=2, row=4), "INVALID_ARGUMENT", "row")
    refusal_of(lambda: get_tile(stubs, gallery="nobody"), "NOT_FOUND")


def test_the_command_makes_a_map_and_a_new_index(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with GalleryDirectory(tmp_path, policy=MANUAL) as directory:
        shop = directory.create("shop", **MODEL)
        shop.upsert([GalleryItem(f"k{i:02}", row) for i, row in enumerate(units(50, 4))])
        shop.rebuild()
        words = ["gallery", "map", "shop", "--galleries", str(tmp_path)]
        assert crossbatch.main(words) == 0
        assert capsys.readouterr().out == "the map of the gallery shop has 50 items by pca, 50 moved\n"
        assert (shop.info().fresh, tile(shop).items) == (0, 50)
        generation = shop.info().generation
        assert crossbatch.main([*words, "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {
            "action": "map", "name": "shop", "method": "pca", "items": 50, "moved": 0, "left_out": 0
        }  # fmt: skip
        assert shop.info().generation == generation
    assert crossbatch.main(["gallery", "info", "shop", "--galleries", str(tmp_path), "--method", "pca"]) == 2
    assert "--method is for map alone" in capsys.readouterr().err


def test_the_first_index_is_made_of_items_that_have_their_places(
    model: Path, data: Path, tmp_path: Path
) -> None:
    index(model, data, tmp_path / "g", map="pca")
    with closing(Gallery.open(tmp_path / "g", policy=MANUAL)) as gallery:
        assert tile(gallery).items == 20
        info = gallery.info()
        assert (info.fresh, info.deleted, info.generation) == (0, 0, 1)
    again = index(model, data, tmp_path / "g", map="pca", sync=True)
    assert (again["unchanged"], again["updated"], again["conflicts"]) == (20, 0, [])
    with closing(Gallery.open(tmp_path / "g", policy=MANUAL)) as gallery:
        assert (tile(gallery).items, gallery.info().generation) == (20, 1)
