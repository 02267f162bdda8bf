"""A record damaged or edited by hand is told with the file and the key, wherever it is read."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serving.errors import BadArtifact
from tests.training.drawn import draw_folder
from training import export, train
from training.evaluation import evaluate
from training.loop.record import check_record
from training.loop.run import read_record

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
    ("name", 3),
    ("name", None),
    ("name", "n" * 201),
    ("metrics", []),
    ("metrics", None),
    ("data", "here"),
    ("data", None),
    ("data.root", 7),
    ("data.root", None),
    ("data.root", ""),
    ("data.root", "a\0b"),
    ("data.root", "\ud800"),
    ("data.format", "zarr"),
    ("data.format", []),
    ("data.format", None),
    ("data.table", 1.5),
    ("data.table", None),
    ("data.digest", 12),
    ("data.digest", "short"),
    ("data.digest", None),
    ("data.train_classes", 3),
    ("data.train_images", "many"),
    ("seed", "zero"),
    ("versions", ["2"]),
    ("git_commit", 5),
]


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


@pytest.mark.parametrize(("key", "value"), [("data", None), ("data.root", 7), ("data.digest", None)])
def test_each_command_tells_a_bad_key(key: str, value: Any, trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    record = read_record(run)
    _change(key, value)(record)
    (run / "record.json").write_text(json.dumps(record))
    with pytest.raises(BadArtifact, match=rf"record\.json is damaged.*{key}"):
        evaluate.run(evaluate.Settings(target=run))
    with pytest.raises(BadArtifact, match=rf"record\.json is damaged.*{key}"):
        train.run(train.Settings(out=run, resume=True))
    with pytest.raises(BadArtifact, match=rf"record\.json is damaged.*{key}"):
        export.run(export.Settings(run_dir=run, model=tmp_path / "m.onnx"))


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
