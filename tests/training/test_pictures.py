"""Pictures and their classes: bad files named, pixels kept or read again."""

import weakref
from math import inf
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from serving.catalog.catalog import read
from serving.errors import BadData
from tests.pictures import encoded
from tests.training.small import NoThreads
from training.data import pictures as module
from training.data.pictures import Pictures, Stream, embed_pictures, training_decoder, viewing_decoder
from training.recipes.recipe import Recipe

RECIPE = Recipe(image_size=16, classes_per_batch=2, images_per_class=2)


def _spoil(root: Path) -> None:
    (root / "class00" / "text.jpg").write_text("this is no image")
    whole = (root / "class01" / "0.png").read_bytes()
    (root / "class01" / "cut.png").write_bytes(whole[: len(whole) // 2])


def _read(root: Path) -> Pictures:
    return Pictures(read(root).rows, viewing_decoder(RECIPE), keep=inf, label="Reading")


def test_bad_images_are_left_out_and_named(root: Path) -> None:
    _spoil(root)
    pictures = _read(root)
    assert [bad.key for bad in pictures.unreadable] == ["class00/text.jpg", "class01/cut.png"]
    assert all(bad.reason for bad in pictures.unreadable)
    assert (len(pictures), pictures.classes) == (9, ("class00", "class01", "class02"))
    assert pictures.labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    module.check_classes(pictures)


def test_a_few_bad_images_are_told_by_name_and_all_are_counted() -> None:
    bad = [{"key": f"{i}.jpg", "reason": "empty"} for i in range(25)]
    lines = module.tell_unreadable(bad)
    assert (len(lines), lines[0]) == (11, "skipped 0.jpg: empty")
    assert lines[-1] == "25 images cannot be read and were left out, of which the first 10 are named."
    assert module.tell_unreadable(bad[:2])[-1] == "2 images cannot be read and were left out."
    assert module.tell_unreadable([]) == []


def test_a_stream_holds_a_bounded_number_of_images(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_AHEAD", 2)
    monkeypatch.setattr(module, "ThreadPoolExecutor", NoThreads)
    _spoil(root)
    made, gone, peak = 0, list[int](), 0

    def decode(data: bytes) -> NDArray[np.uint8]:
        nonlocal made
        pixels = viewing_decoder(RECIPE)(data)
        made += 1
        weakref.finalize(pixels, gone.append, made)
        return pixels

    stream = Stream(read(root).rows, decode)
    embedded = []

    def embed(pixels: np.ndarray) -> np.ndarray:
        nonlocal peak
        peak = max(peak, made - len(gone))
        embedded.append(len(pixels))
        return pixels.reshape(len(pixels), -1).astype(np.float32)

    features = embed_pictures(embed, stream, batch=3)
    assert (features.shape, embedded) == ((9, 16 * 16 * 3), [3, 3, 3])
    assert peak <= 3 + 3  # a batch, and what is decoded ahead of it or was handed over last
    assert [row.key for row in stream.rows] == [f"class{c:02d}/{i}.png" for c in range(3) for i in range(3)]
    assert [bad.key for bad in stream.unreadable] == ["class00/text.jpg", "class01/cut.png"]


def test_quarter_turns_are_classes_of_their_own(root: Path) -> None:
    pictures = _read(root)
    turned = module.QuarterTurns(pictures)
    assert len(turned.labels) == 4 * len(pictures)
    for turn, image in [(0, 4), (1, 4), (2, 0), (3, 8)]:
        index = turn * len(pictures) + image
        assert np.array_equal(turned[index], np.rot90(pictures[image], turn))
        assert turned.labels[index] == pictures.labels[image] + turn * len(pictures.classes)


def test_what_does_not_fit_is_read_again(root: Path) -> None:
    rows = read(root).rows
    kept = Pictures(rows, training_decoder(RECIPE), keep=inf, label="Reading")
    some = Pictures(rows, training_decoder(RECIPE), keep=2 * 20 * 20 * 3, label="Reading")
    assert some.room == 0
    for ours, theirs in zip(kept, some, strict=True):
        assert np.array_equal(ours, theirs)
    rows[0].image.path.unlink()
    rows[5].image.path.unlink()
    assert some[0].shape == (20, 20, 3)  # kept
    with pytest.raises(BadData, match=r"class01.2\.png could be read before"):
        some[5]


@pytest.mark.parametrize("processes", [1, 4, 12])
def test_processes_share_pictures_out_in_order(root: Path, processes: int) -> None:
    pictures = _read(root)
    shares = [pictures.share(rank, processes) for rank in range(processes)]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    together = [image for share in shares for image in share]
    assert len(together) == len(pictures)
    assert all((ours == theirs).all() for ours, theirs in zip(together, pictures, strict=True))


def test_a_training_image_is_shrunk_to_twice_the_size_and_a_long_one_cut_to_its_middle() -> None:
    assert training_decoder(RECIPE)(encoded(np.zeros((80, 100, 3), np.uint8))).shape == (32, 40, 3)
    pixels = training_decoder(RECIPE)(encoded((np.arange(4000) // 16).astype(np.uint8)[None]))
    assert pixels.shape == (1, 16, 3)
    assert set(pixels[0, :, 0].tolist()) <= {124, 125}  # of 0 to 249
