"""Pairs of items that are nearly alike, and the clusters that they make, beside a loop over all pairs."""

import csv
import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

import crossbatch
from serving.gallery.directory import GalleryDirectory
from serving.gallery.gallery import GalleryItem
from serving.gallery.search import duplicates
from tests.serving.indexed import index
from tests.serving.vectors import MANUAL, MODEL, clustered, created, normalized, units


@pytest.mark.parametrize(
    ("indexed", "type_"),
    [(0, "exact"), (150, "exact"), (300, "exact"), (200, "HNSW16,SQ8"), (300, "PQ8x4fs,RFlat")],
)
def test_all_pairs_are_found_once_and_joined(
    tmp_path: Path, indexed: int, type_: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duplicates, "_ROWS", 64)
    rows = np.concatenate([clustered(280, 16), np.repeat(units(1), 20, axis=0)])
    rows[250:260] = normalized(rows[:10] + 0.01 * units(10))
    gallery = created(tmp_path / "g", 16, index=type_)
    items = [GalleryItem(f"k{i:03}", row, f"l{i % 7}") for i, row in enumerate(rows)]
    for some in (items[:indexed], items[indexed:]):
        gallery.upsert(some)
        if len(some) == indexed:
            gallery.rebuild()
    gallery.upsert([items[5]])  # its older self is no twin
    gallery.delete(["k281", "k003"])
    left = [i for i in range(300) if i not in (3, 281)]
    scores = rows.astype(np.float64) @ rows.T.astype(np.float64)
    expected = {(f"k{i:03}", f"k{j:03}") for i, j in combinations(left, 2) if round(scores[i, j], 6) >= 0.9}
    steps: list[int] = []
    found = gallery.duplicates(0.9, progress=lambda _, done, total: steps.append(total - done))
    assert {(pair.key, pair.other) for pair in found} == expected
    assert len(found) == len(expected)
    joined = {key: {key} for pair in expected for key in pair}
    for one, other in expected:  # the slow way
        whole = joined[one] | joined[other]
        joined.update(dict.fromkeys(whole, whole))
    sizes = [len(joined[pair.key]) for pair in found]
    assert sizes == sorted(sizes, reverse=True)  # the largest cluster first
    assert len({(pair.cluster, id(joined[pair.key])) for pair in found}) == max(
        pair.cluster for pair in found
    )
    for pair in found:
        assert pair.score == pytest.approx(scores[int(pair.key[1:]), int(pair.other[1:])], abs=1e-6)
        assert pair.label == f"l{int(pair.key[1:]) % 7}"
    assert steps[-1] == 0
    assert {pair.cluster for pair in gallery.duplicates(1.0)} == {1}  # the same picture, though rounded
    gallery.close()


def test_an_item_that_is_written_often_keeps_its_twin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duplicates, "NEAREST", 2)
    gallery = created(tmp_path / "g", 16)
    items = [GalleryItem(f"k{i:03}", row) for i, row in enumerate(units(200))]
    gallery.upsert([*items, replace(items[0], key="twin")])
    for _ in range(6):
        gallery.upsert([items[0], replace(items[0], key="twin")])
        gallery.rebuild(whole=False)
    assert [(pair.key, pair.other) for pair in gallery.duplicates(0.97)] == [("k000", "twin")]
    gallery.close()


def test_of_a_picture_that_many_have_the_cluster_is_whole(tmp_path: Path) -> None:
    gallery = created(tmp_path / "g", 16)
    gallery.upsert([GalleryItem(f"{i}", units(1)[0]) for i in range(400)])
    for _ in range(2):  # newer than the index, and in it
        found = gallery.duplicates(0.99)
        assert len({key for pair in found for key in (pair.key, pair.other)}) == 400
        assert {pair.cluster for pair in found} == {1}
        assert len(found) <= 400 * duplicates.NEAREST
        gallery.rebuild()
    gallery.close()


def test_the_command_tells_them_in_a_table_json_and_csv(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    galleries, out = tmp_path / "galleries", tmp_path / "pairs.csv"
    with GalleryDirectory(galleries, policy=MANUAL) as directory:
        rows = np.eye(4, dtype=np.float32)[[0, 0, 1, 2, 2, 2]]
        directory.create("shop", **MODEL).upsert(
            [GalleryItem(f"k{i}", row, f"l{i}") for i, row in enumerate(rows)]
        )
    words = ["gallery", "duplicates", "shop", "--galleries", str(galleries)]
    assert crossbatch.main([*words, "--out", str(out)]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head == "4 pairs of the 6 items of the gallery shop score 0.97 or more; they make 2 clusters"
    assert lines[0] == "  cluster 1  1.0000  k3 (l3)  k4 (l4)"
    assert lines[-1] == f"wrote {out}"
    with out.open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [each["other"] for each in table] == ["k4", "k5", "k5", "k1"]
    assert table[3] == {
        "cluster": "2", "key": "k0", "other": "k1", "score": "1.0", "label": "l0", "other_label": "l1"
    }  # fmt: skip
    assert crossbatch.main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["clusters"] == [["k3", "k4", "k5"], ["k0", "k1"]]
    with GalleryDirectory(galleries, policy=MANUAL) as directory:
        directory.get("shop").delete(["k0", "k3", "k4"])
    assert crossbatch.main([*words, "--above", "0.5"]) == 0
    assert capsys.readouterr().out == "no two of the 3 items of the gallery shop score 0.5 or more\n"
    for wrong in (["--above", "2"], ["--out", str(tmp_path / "no" / "x.csv")]):
        assert crossbatch.main([*words, *wrong]) == 2
    assert crossbatch.main(["gallery", "info", "shop", "--galleries", str(galleries), "--above", "1"]) == 2
    assert "--above is for duplicates alone" in capsys.readouterr().err
    assert crossbatch.main(["gallery", "list", "--galleries", str(tmp_path), "--thumbnails"]) == 2
    assert "--thumbnails is for export alone" in capsys.readouterr().err


def test_indexing_ends_with_the_pairs_above_a_score(
    tmp_path: Path, model: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (data / "class0" / "again.jpg").write_bytes((data / "class1" / "01.jpg").read_bytes())
    words = ["index", "--model", str(model), "--data", str(data), str(tmp_path / "g"), "--fail-above", "1"]
    assert crossbatch.main(words) == 2
    assert "1 pair of items of " in (said := capsys.readouterr().err)
    assert "class0/again.jpg and class1/01.jpg (1.0000)" in said
    assert f"`crossbatch gallery duplicates g --galleries {tmp_path} --above" in said
    (data / "class0" / "again.jpg").unlink()
    assert index(model, data, tmp_path / "g", fail_above=1, sync=True)["duplicates"] == []
