"""What a gallery keeps when its process is killed at any moment, and when its disk is full."""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from serving.errors import Overloaded
from serving.gallery.folder.directory import GalleryDirectory
from serving.gallery.gallery import Gallery, Item, RebuildPolicy

DIMENSION = 32
KILLS = 20

# Writes without end, and says what is about to be written and what has been acknowledged. A call replaces or
# deletes a whole group of items, so that a half of one would show.
WRITER = """
import json, sys
import numpy as np
from pathlib import Path
from serving.gallery.gallery import Gallery, Item, RebuildPolicy

path, first = Path(sys.argv[1]), int(sys.argv[2])
gallery = Gallery.open(path, policy=RebuildPolicy(least=40, share=0.0))
rng = np.random.default_rng(first)
step = first
while True:
    step += 1
    group = int(rng.integers(8))
    keys = [f"{group}/{i}" for i in range(10)]
    kind = ["upsert", "upsert", "upsert", "delete", "rebuild"][int(rng.integers(5))]
    print(json.dumps(["begin", kind, group, step]), flush=True)
    if kind == "upsert":
        rows = rng.standard_normal((10, 32)).astype(np.float32)
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        gallery.upsert([Item(key, row, str(step)) for key, row in zip(keys, rows)])
    elif kind == "delete":
        gallery.delete(keys)
    else:
        gallery.rebuild()
    print(json.dumps(["done", kind, group, step]), flush=True)
"""


def label_of(gallery: Gallery, group: int) -> int | None:
    """The step that wrote a group, None where it is not there; half a group fails."""
    with gallery._store.read() as reader:
        found = reader.items([f"{group}/{i}" for i in range(10)])
    assert len(found) in (0, 10)
    labels = {item.label for item in found.values()}
    assert len(labels) <= 1
    return int(labels.pop()) if labels else None


@pytest.mark.timeout(120)
def test_killed_writer_loses_nothing_acknowledged(tmp_path: Path) -> None:
    path = tmp_path / "a"
    Gallery.create(path, model_name="m", fingerprint="f" * 64, dimension=DIMENSION).close()
    expected: dict[int, int | None] = dict.fromkeys(range(8))
    chance = random.Random(0)
    step = 0
    for _ in range(KILLS):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(step)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        lines = [process.stdout.readline()]  # it has begun
        time.sleep(chance.uniform(0.0, 0.25))
        os.kill(process.pid, signal.SIGKILL)
        lines += process.stdout.readlines()
        process.stdout.close()
        process.wait()
        pending: tuple[int, int | None] | None = None
        for line in lines:
            if not line.endswith("\n"):
                continue  # cut off by the kill: what it said had not been said
            event, kind, group, step = json.loads(line)
            after = step if kind == "upsert" else None
            pending = (group, after) if event == "begin" and kind != "rebuild" else None
            if event == "done" and kind != "rebuild":
                expected[group] = after
        gallery = Gallery.open(path, policy=RebuildPolicy(automatic=False))
        found = {group: label_of(gallery, group) for group in range(8)}
        if pending is not None and found[pending[0]] == pending[1]:
            expected[pending[0]] = pending[1]  # stored, and killed before it could say so
        assert found == expected
        query = np.eye(1, DIMENSION, dtype=np.float32)
        (hits,) = gallery.search(query, 200)
        labels = {int(hit.key.split("/")[0]): int(hit.label) for hit in hits}
        assert labels == {group: label for group, label in expected.items() if label is not None}
        assert len(hits) == 10 * len(labels) == gallery.info().items
        gallery.close()
    assert step > 5 * KILLS  # it did get to write
    gallery = Gallery.open(path)
    gallery.rebuild()
    assert len(list(path.glob("index-*.faiss"))) == 1  # what the dead left behind is gone
    gallery.close()


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
    directory = GalleryDirectory(small_disk, policy=RebuildPolicy(automatic=False))
    gallery = directory.create("a", model_name="m", fingerprint="f" * 64, dimension=DIMENSION)
    rows = np.random.default_rng(0).standard_normal((10, DIMENSION)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    acknowledged: list[str] = []

    def fill() -> None:
        for step in range(10_000):
            keys = [f"{step}/{i}" for i in range(10)]
            gallery.upsert([Item(key, row, "x" * 1000) for key, row in zip(keys, rows, strict=True)])
            acknowledged.extend(keys)

    with pytest.raises(Overloaded, match="full") as caught:
        fill()
    assert "\n" not in str(caught.value)
    assert caught.value.retry_after >= 1
    with suppress(OSError), filler.open("ab", buffering=0) as file:  # to the last byte
        while True:
            file.write(b"x" * 4096)
    with pytest.raises(Overloaded, match="full"):
        gallery.rebuild()
    with pytest.raises(Overloaded, match="full"):
        directory.create("b", model_name="m", fingerprint="f" * 64, dimension=DIMENSION)
    assert directory.names() == ["a"]
    assert len(acknowledged) > 100
    assert {hit.key for hit in gallery.search(rows[:1], 2048)[0]} == set(acknowledged)  # searches go on
    directory.close()
    filler.unlink()
    directory = GalleryDirectory(small_disk)
    gallery = directory.get("a")
    assert [item.key for item in gallery.get(acknowledged)] == acknowledged
    assert gallery.info().items == len(acknowledged)
    gallery.delete(acknowledged[:50])
    directory.close()


def test_copy_to_a_full_disk_is_refused_and_leaves_nothing(small_disk: Path, tmp_path: Path) -> None:
    gallery = Gallery.create(tmp_path / "a", model_name="m", fingerprint="f" * 64, dimension=DIMENSION)
    row = np.eye(1, DIMENSION, dtype=np.float32)[0]
    gallery.upsert([Item(f"{i}", row, "x" * 1000, metadata={"x": "y" * 5000}) for i in range(1000)])
    with pytest.raises(Overloaded, match=f"{small_disk}.* is full"):
        gallery._store.copy_to(small_disk / "copy")
    assert list(small_disk.iterdir()) == []
    gallery._store.copy_to(tmp_path / "copy")
    assert gallery._store.check() == []
    gallery.close()
