"""The benchmark of decoders, in short: each way gives the same picture, and what is missing is told."""

import csv
import io
import random
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks.decode import OURS, PHOTOS, apart, decoders, main, mosaic, turns
from serving.model.encoder import Encoder
from tests.pictures import encoded, picture
from tests.tiny_model import SIZE, write_tiny_model


@pytest.fixture
def encoder(tmp_path: Path) -> Encoder:
    return Encoder(write_tiny_model(tmp_path / "model.onnx"), threads=1)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for seed in range(12):
        folder = tmp_path / "data" / f"class{seed % 4}"
        folder.mkdir(parents=True, exist_ok=True)
        colour = 60 + 100 * np.eye(4, 3, dtype=np.uint8)[seed % 4]
        Image.fromarray(picture(48 + seed, 40) // 4 + colour).save(folder / f"{seed}.jpg")
    return tmp_path / "data"


@pytest.mark.parametrize(("width", "height"), [(400, 300), (31, 40)])
def test_every_way_gives_the_centred_square(encoder: Encoder, width: int, height: int) -> None:
    photo = encoded(picture(width, height), "JPEG", quality=95)
    ways, missing = decoders(encoder)
    assert {OURS, "torchvision"} <= ways.keys()
    assert len(ways) + len(missing) == 10
    for name, way in ways.items():
        pixels = way(photo)
        assert pixels.shape == (SIZE, SIZE, 3), name
        assert pixels.dtype == np.uint8, name
        assert apart(way, ways[OURS], [photo]) < 16, name  # a shift by half a pixel
    assert apart(lambda _: ways[OURS](photo) // 2 + 100, ways[OURS], [photo]) > 10


def test_a_package_that_is_missing_is_told(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(name: str) -> object:
        raise ImportError(name)

    monkeypatch.setattr("importlib.import_module", without)
    ways, missing = decoders(encoder)
    assert missing == ["simplejpeg", "torchvision", "imagecodecs", "pyvips", "cv2"]
    assert all(name.startswith("Pillow") for name in ways)


def test_a_mosaic_is_covered_and_all_take_as_many_turns(data: Path) -> None:
    files = sorted(data.rglob("*.jpg"))
    photo = mosaic(files, 300, 200, random.Random(0))
    with Image.open(io.BytesIO(photo)) as image:
        assert image.size == (300, 200)
        assert np.asarray(image).any(axis=2).all()
    ways = {name: lambda _: np.zeros(1, np.uint8) for name in "ab"}
    seconds = turns(ways, [photo], 3, random.Random(0))
    assert [len(each) for each in seconds.values()] == [3, 3]


def test_the_whole_in_short(
    encoder: Encoder, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"{tmp_path / 'model.onnx'} {data} --rounds 2 --photos 1 --scale 0.02 --out {tmp_path / 'd.csv'}"
    main(words.split())
    with (tmp_path / "d.csv").open() as file:
        rows = list(csv.DictReader(file))
    ways, missing = decoders(encoder)
    assert [(row["photos"], row["decoder"]) for row in rows] == [
        (kind, way) for kind in PHOTOS for way in ways
    ]
    ours = [row for row in rows if row["decoder"] == OURS]
    assert {(row["ratio"], row["difference"], row["images"]) for row in ours} == {("1", "0", "6")}
    assert {(row["map_at_r"], row["recall_at_1"]) for row in rows} == {("1", "1")}  # colours tell all apart
    shown = capsys.readouterr().out
    assert shown.startswith(f"not installed: {', '.join(missing) or 'none'}\n")
    assert shown.count(f"| {OURS} |") == len(PHOTOS)
