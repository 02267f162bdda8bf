"""A record damaged or edited by hand is told with file and key; the reading of metrics.csv."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serving.errors import BadArtifact
from tests.training.drawn import draw_folder
from training import train
from training.loop.logbook import read_history
from training.loop.run import check_record, read_record

RECIPE = "image_size: 16\ndimension: 8\nprototypes: 4\nclasses_per_batch: 2\nimages_per_class: 2\nepochs: 1\n"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    data = draw_folder(folder / "data", classes=4, images=3, size=18)
    (folder / "tiny.yaml").write_text(RECIPE)
    train.run(train.Settings(recipe=str(folder / "tiny.yaml"), data=data, out=folder / "run"))
    return folder / "run"


def _change(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(record: dict[str, Any]) -> None:
        *parents, last = key.split(".")
        for parent in parents:
            record = record[parent]
        if value is None:
            del record[last]
        else:
            record[last] = value

    return change


BAD = [
    ("name", None), ("name", "n" * 201), ("metrics", None), ("data", None), ("data.root", ""),
    ("data.root", "a\0b"), ("data.root", "\ud800"), ("data.format", "zarr"), ("data.digest", "short"),
    ("data.train_images", "many"), ("seed", "zero"), ("versions", ["2"]),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), BAD)
def test_a_bad_key_is_named_with_its_file(key: str, value: Any, trained: Path, tmp_path: Path) -> None:
    record = read_record(trained)
    _change(key, value)(record)
    (tmp_path / "record.json").write_text(json.dumps(record))
    with pytest.raises(BadArtifact) as caught:
        read_record(tmp_path)
    told = str(caught.value)
    assert f"{tmp_path / 'record.json'} is damaged" in told
    assert f" {key}" in told
    assert len(told.removeprefix(str(tmp_path))) < 250
    assert "\n" not in told


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "3",
        "{",
        "\udcff",
        pytest.param("[" * 100_000, id="nested"),
        pytest.param('{"name": ' + "1" * 5000 + "}", id="digits"),
    ],
)
def test_a_file_that_is_no_record_is_told(text: str, tmp_path: Path) -> None:
    (tmp_path / "record.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(BadArtifact, match=r"record\.json is damaged"):
        read_record(tmp_path)


def test_keys_beside_ours_stay(trained: Path) -> None:
    record = read_record(trained) | {"note": "by hand"}
    assert check_record(record, source="here") == record


def test_what_is_written_is_read(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("epoch,map_at_r,loss\n0,0.5,\n1,0.75,2.5\n")
    found = read_history(tmp_path)
    assert found.names == ["map_at_r", "loss"]
    assert found.points("map_at_r") == [(0, 0.5), (1, 0.75)]
    assert found.points("loss") == [(1, 2.5)]
    assert found.points("nothing") == []


def test_only_finite_numbers_count(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text(
        "epoch,loss,note,\n2,nan,good,1\n1,inf,,\n,3,,\nx,4,,\n3,1.5,7,,8,9\n3,1.25\n"
    )
    found = read_history(tmp_path)
    assert found.rows == ({"epoch": 1}, {"epoch": 2}, {"epoch": 3, "loss": 1.25})


@pytest.mark.parametrize("text", ["", "epoch,loss\n", "loss\n1\n"])
def test_an_empty_history(tmp_path: Path, text: str) -> None:
    assert read_history(tmp_path).rows == ()
    (tmp_path / "metrics.csv").write_text(text)
    assert read_history(tmp_path).rows == ()


def test_damage_is_told(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_bytes(b"epoch,loss\n\xff\xfe,1\n")
    with pytest.raises(BadArtifact, match=r"metrics.csv is damaged: it is not a readable table"):
        read_history(tmp_path)
    (tmp_path / "metrics.csv").write_text("epoch\n" + "1" * 200_000)
    with pytest.raises(BadArtifact, match="damaged"):
        read_history(tmp_path)
