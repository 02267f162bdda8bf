"""Images and metadata as callers have them: open files, uploads, pixels, numbers of NumPy."""

import io
import itertools
from collections.abc import Iterable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serving.client import given
from serving.client.client import Client, Item
from serving.errors import BadImage, InvalidArgument
from serving.gallery.directory import GalleryDirectory
from tests.serving.rpc_fakes import FakeEncoder, serving, vector_for


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with serving(FakeEncoder(), GalleryDirectory(tmp_path)) as running, Client(running.address) as client:
        yield client


class Trickle(io.RawIOBase):
    """Gives a byte at a time, as what comes over a network may, and never more than so many."""

    def __init__(self, data: Iterable[int]) -> None:
        self.data = iter(data)

    def read(self, size: int = -1) -> bytes:
        return bytes(itertools.islice(self.data, 1))


def test_an_image_may_be_an_open_file(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "picture.jpg"
    path.write_bytes(b"picture")
    with path.open("rb") as file, path.open("rb", buffering=0) as raw:
        images = [file, raw, io.BytesIO(b"picture"), Trickle(b"picture")]
        vectors = client.embed(images)
        np.testing.assert_array_equal(vectors, np.stack([vector_for(b"picture")] * 4))
    with pytest.raises(BadImage, match=r"in BufferedReader cannot be read \(read of closed file\)"):
        client.embed([file])
    client.create("birds")
    assert client.upsert("birds", [Item("a", image=io.BytesIO(b"picture"))]) == [1]


def test_a_file_that_is_no_binary_one_is_told_what_to_do() -> None:
    class Upload:
        async def read(self, size: int = -1) -> bytes:
            return b""

    uploads: Any = [[Upload()], [io.StringIO("text")]]
    with Client("127.0.0.1:1") as client:
        for images, kind in zip(uploads, ("coroutine", "str"), strict=True):
            with pytest.raises(InvalidArgument, match=f"reads as {kind}; open the file in binary mode"):
                client.embed(images)
        with pytest.raises(InvalidArgument, match=r"found ndarray\. Encode pixels first, as PNG"):
            client.embed([np.zeros((2, 2, 3))])  # type: ignore[list-item]


def test_an_endless_file_is_not_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(given, "_MOST_BYTES", 1_000)
    with Client("127.0.0.1:1") as client, pytest.raises(BadImage, match="in Trickle is larger than"):
        client.embed([Trickle(itertools.repeat(0))])


def test_a_single_input_is_told_to_want_brackets() -> None:
    with Client("127.0.0.1:1") as client:
        for single in (Path("photo.jpg"), b"bytes", "photo.jpg"):
            with pytest.raises(
                InvalidArgument, match=r"images must be a list; .*brackets: images=\[\.\.\.\]"
            ):
                client.embed(single)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({"price": np.int64(5)}, "price is of int64"),
        ({"sold": {"at": [1, date(2026, 1, 1)]}}, r"sold\.at\[1\] is of date"),
        ({"a": {5: "x"}}, "a has the name 5, which is no string"),
        ({"price": float("inf")}, "price is inf"),
        ({"sizes": [1.5, {"eu": np.float64("nan")}]}, r"sizes\[1\]\.eu is nan"),
    ],
)
def test_metadata_that_cannot_travel_is_named_with_its_item(metadata: Any, says: str) -> None:
    item = Item("boot/1", vector=vector_for(b"x"), metadata=metadata)
    with (
        Client("127.0.0.1:1") as client,
        pytest.raises(InvalidArgument, match=f"The item 'boot/1': .* JSON does not know: {says}"),
    ):
        client.upsert("birds", [item])
