"""Copying galleries: all of an item goes along, a broken copy goes on, and what differs is found."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from serving.errors import InvalidArgument, Mismatch, ModelMismatch
from serving.gallery.address import placed
from serving.gallery.command import Settings, render, run
from serving.gallery.directory import GalleryDirectory
from serving.gallery.gallery import Gallery
from serving.gallery.item import JPEG, GalleryItem, Source
from serving.gallery.milvus.gallery import MilvusGallery
from serving.gallery.place import Galleries, galleries_at
from tests.serving.vectors import MANUAL, MODEL, units

ITEMS = 250


def item(number: int, **more: Any) -> GalleryItem:
    given: dict[str, Any] = {
        "label": f"ü{number % 3}",
        "uri": f"file:{number}",
        "metadata": {"n": number, "share": number / 7, "text": "“x”", "list": [1, None, {"b": 1.0, "a": 2}]},
        "source": Source("origin", number, 2**60 + number, bytes([number % 256] * 32)),
    }
    return GalleryItem(f"k{number:03}", units(ITEMS, 4)[number], **given | more)


def filled(gallery: str, *, thumbnails: bool = False) -> None:
    with opened(gallery)[0] as directory:
        side, picture = (32, {"thumbnail": JPEG + b"0"}) if thumbnails else (0, {})
        made = directory.create(gallery.rpartition("/")[2], **MODEL, thumbnail_side=side, recall=0.9)
        made.upsert(item(number, **picture) for number in range(ITEMS))


def copied(name: str, other: str, **more: Any) -> dict[str, Any]:
    return run(Settings.model_validate({"action": "copy", "name": name, "other": other, **more}))


def told(result: dict[str, Any]) -> tuple[int, int, int]:
    return result["items"], result["written"], result["deleted"]


def opened(gallery: str) -> tuple[Galleries, str]:
    place, name = placed(gallery, Path())
    return galleries_at(place, policy=MANUAL), name


def contents(gallery: str) -> list[Any]:
    directory, name = opened(gallery)
    with directory:
        items = [*directory.get(name).by_key(thumbnails=True)]
    return [(it.key, it.vector.tolist(), it.label, it.uri, it.metadata, it.source) for it in items]


def names(gallery: str) -> list[str]:
    with opened(gallery)[0] as directory:
        return directory.names()


@pytest.fixture(params=["folder", "milvus"])
def there(request: pytest.FixtureRequest, memory: Path) -> str:
    """A gallery that is not there, in a folder and in Milvus."""
    return f"{memory}/there/copy" if request.param == "folder" else f"{request.getfixturevalue('place')}/copy"


def test_a_copy_has_all_and_is_brought_in_step(memory: Path, there: str) -> None:
    here, back = f"{memory}/here/birds", f"{memory}/back/birds"
    filled(here)
    result = copied(here, there)
    assert told(result) == (ITEMS, ITEMS, 0)
    checksum = result["checksum"]
    assert render(result) == (
        f"{there} holds the 250 items of {here}: checksum {checksum[:12]}, 250 were written"
    )
    assert contents(there) == contents(here)
    assert names(there) == ["copy"]
    assert told(copied(here, there)) == (ITEMS, 0, 0)
    assert copied(there, back)["checksum"] == checksum
    assert contents(back) == contents(here)
    with opened(here)[0] as directory:
        directory.get("birds").upsert([item(7, label="other")])
        directory.get("birds").delete(["k003", "k200"])
    with pytest.raises(Mismatch, match="the copy has the item 'k003', which the gallery copied has not"):
        copied(here, there)
    assert told(copied(here, there, sync=True)) == (ITEMS - 2, 0, 2)
    assert contents(there) == contents(here)


def test_a_copy_in_a_folder_is_indexed_alike_and_has_thumbnails(memory: Path) -> None:
    filled(f"{memory}/birds", thumbnails=True)
    assert told(copied("birds", "more", galleries=memory)) == (ITEMS, ITEMS, 0)
    with GalleryDirectory(memory, policy=MANUAL) as directory:
        info = directory.get("more").info()
        assert (info.fresh, info.index_items, info.wanted_recall) == (0, ITEMS, 0.9)
        pictures = {it.thumbnail for it in directory.get("more").by_key(thumbnails=True)}
    assert pictures == {JPEG + b"0"}


def test_a_copy_without_thumbnails_is_told(memory: Path, there: str) -> None:
    filled(f"{memory}/birds", thumbnails=True)
    with opened(there)[0] as directory:
        directory.create("copy", **MODEL)
        directory.create("other", **MODEL | {"fingerprint": "e" * 64})
    assert render(copied(f"{memory}/birds", there)).endswith(f", {there} keeps no thumbnails")
    with pytest.raises(ModelMismatch, match=r"gallery other .* eeeeeeeeeeee, .* ffffffffffff"):
        copied(f"{memory}/birds", there.replace("copy", "other"))


def test_what_a_copy_lost_is_found_and_it_gets_no_name(
    memory: Path, there: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(f"{memory}/birds")
    kind = MilvusGallery if there.startswith("milvus") else Gallery
    upsert = kind.upsert
    for message, stored in {
        "the copy lacks the item 'k100' of the gallery copied": [],
        "the copy has another item 'k100' than the gallery copied": [item(100, uri="other")],
    }.items():

        def losing(gallery: Any, items: list[GalleryItem], stored: Any = stored) -> list[int]:
            return upsert(gallery, [*(it for it in items if it.key != "k100"), *stored])

        monkeypatch.setattr(kind, "upsert", losing)
        with pytest.raises(Mismatch, match=message):
            copied(f"{memory}/birds", there)
        assert names(there) == ["copy.unfinished"]


KILLED = """
import os, signal, sys
from serving.gallery import copying, vectors
from serving.gallery.command import Settings, run

def pages(gallery, **more):
    for number, page in enumerate(whole(gallery, **more)):
        if number == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        yield page

vectors._AT_ONCE = 50
whole, copying.pages = copying.pages, pages
run(Settings(action="copy", name=sys.argv[1], other=sys.argv[2]))
"""


def test_a_copy_that_was_killed_goes_on(memory: Path, there: str) -> None:
    here = f"{memory}/here/birds"
    filled(here)
    killed = subprocess.run([sys.executable, "-c", KILLED, here, there], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert names(there) == ["copy.unfinished"]
    with opened(there)[0] as directory:
        directory.get("copy.unfinished").upsert([item(8, label="damaged"), GalleryItem("z", item(0).vector)])
    assert told(copied(here, there)) == (ITEMS, ITEMS - 150 + 1, 1)
    assert contents(there) == contents(here)
    assert names(there) == ["copy"]


def test_a_gallery_is_not_copied_over_itself(memory: Path) -> None:
    filled(f"{memory}/birds.unfinished")
    for name in ("birds", "birds.unfinished"):
        with pytest.raises(InvalidArgument, match=r"birds\.unfinished cannot be copied to"):
            copied(f"{memory}/birds.unfinished", f"{memory}/{name}")
    assert names(f"{memory}/birds") == ["birds.unfinished"]
