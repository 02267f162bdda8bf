"""What a gallery keeps when its disk is full, and what it then says."""

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from serving.errors import Overloaded
from serving.gallery.directory import GalleryDirectory
from serving.gallery.gallery import Gallery, Item
from tests.serving.vectors import MANUAL, MODEL, units


@pytest.fixture
def small_disk() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp())  # pytest cannot clean up a mounted folder of its own
    mount = ["mount", "-t", "tmpfs", "-o", "size=5m", "none", str(folder)]
    try:
        mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        folder.rmdir()
        pytest.skip("no right to mount a small disk here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
        folder.rmdir()


def test_full_disk_loses_nothing_acknowledged(small_disk: Path) -> None:
    filler = small_disk / "filler"
    filler.write_bytes(b"x" * (2 << 20))
    rows = units(10, 32)
    made_for = {**MODEL, "dimension": 32}
    acknowledged: list[str] = []

    def fill(gallery: Gallery) -> None:
        for step in range(10_000):
            keys = [f"{step}/{i}" for i in range(10)]
            gallery.upsert([Item(key, row, "x" * 1000) for key, row in zip(keys, rows, strict=True)])
            acknowledged.extend(keys)

    with GalleryDirectory(small_disk, policy=MANUAL) as directory:
        gallery = directory.create("a", **made_for)
        with pytest.raises(Overloaded, match="full") as caught:
            fill(gallery)
        assert "\n" not in str(caught.value)
        assert caught.value.retry_after >= 1
        with suppress(OSError), filler.open("ab", buffering=0) as file:  # to the last byte
            while True:
                file.write(b"x" * 4096)
        for work in (gallery.rebuild, partial(directory.create, "b", **made_for)):
            with pytest.raises(Overloaded, match="full"):
                work()
        assert directory.names() == ["a"]
        assert len(acknowledged) > 100
        assert {hit.key for hit in gallery.search(rows[:1], 2048)[0]} == set(acknowledged)  # searches go on
    filler.unlink()
    with GalleryDirectory(small_disk) as directory:
        assert [item.key for item in directory.get("a").get(acknowledged)] == acknowledged
        assert directory.get("a").info().items == len(acknowledged)
        directory.get("a").delete(acknowledged[:50])
