"""Copying galleries: all of an item goes along, a broken copy goes on, and what differs is found."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from serving.errors import Mismatch, ModelMismatch
from serving.gallery.command import Settings, render, run
from serving.gallery.directory import GalleryDirectory
from serving.gallery.gallery import Gallery
from serving.gallery.item import JPEG, GalleryItem, Source
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


def filled(folder: Path, name: str, *, thumbnails: bool = False) -> None:
    with GalleryDirectory(folder, policy=MANUAL) as directory:
        gallery = directory.create(name, **MODEL, thumbnail_side=32 if thumbnails else 0, recall=0.9)
        picture = {"thumbnail": JPEG + b"0"} if thumbnails else {}
        gallery.upsert(item(number, **picture) for number in range(ITEMS))


def copied(name: Path | str, other: Path | str, **more: Any) -> dict[str, Any]:
    return run(Settings.model_validate({"action": "copy", "name": str(name), "other": str(other), **more}))


def told(result: dict[str, Any]) -> tuple[int, int, int]:
    return result["items"], result["written"], result["deleted"]


def contents(path: Path) -> list[Any]:
    with GalleryDirectory(path.parent, policy=MANUAL) as directory:
        items = [*directory.get(path.name).by_key(thumbnails=True)]
    return [
        (it.key, it.vector.tolist(), it.label, it.uri, it.metadata, it.source, it.thumbnail) for it in items
    ]


@pytest.mark.parametrize("thumbnails", [False, True])
def test_a_copy_has_all_and_is_brought_in_step(memory: Path, thumbnails: bool) -> None:
    here, there = memory / "here/birds", memory / "there/copy"
    filled(here.parent, "birds", thumbnails=thumbnails)
    result = copied(here, there)
    assert told(result) == (ITEMS, ITEMS, 0)
    checksum = result["checksum"][:12]
    assert render(result) == (f"{there} holds the 250 items of {here}: checksum {checksum}, 250 were written")
    assert contents(there) == contents(here)
    with GalleryDirectory(there.parent, policy=MANUAL) as directory:
        assert directory.names() == ["copy"]
        info = directory.get("copy").info()
        assert (info.fresh, info.index_items, info.wanted_recall) == (0, ITEMS, 0.9)
    assert told(copied(here, there)) == (ITEMS, 0, 0)
    with GalleryDirectory(here.parent, policy=MANUAL) as directory:
        directory.get("birds").upsert([item(7, label="other")])
        directory.get("birds").delete(["k003", "k200"])
    with pytest.raises(Mismatch, match="the copy has the item 'k003', which the gallery copied has not"):
        copied(here, there)
    assert told(copied(here, there, sync=True)) == (ITEMS - 2, 0, 2)
    assert contents(there) == contents(here)


def test_names_lie_in_the_place_of_galleries(memory: Path) -> None:
    filled(memory, "birds", thumbnails=True)
    assert told(copied("birds", "more", galleries=memory)) == (ITEMS, ITEMS, 0)
    with GalleryDirectory(memory, policy=MANUAL) as directory:
        assert directory.names() == ["birds", "more"]
        directory.create("plain", **MODEL)
        directory.create("other", **MODEL | {"fingerprint": "e" * 64})
    assert render(copied("birds", "plain", galleries=memory)).endswith(", plain keeps no thumbnails")
    assert not any(it[-1] for it in contents(memory / "plain"))
    with pytest.raises(ModelMismatch, match=r"gallery other .* eeeeeeeeeeee, .* ffffffffffff"):
        copied("birds", "other", galleries=memory)


def test_what_a_copy_lost_is_found_and_it_gets_no_name(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(memory, "birds")
    upsert = Gallery.upsert
    for message, stored in {
        "the copy lacks the item 'k100' of the gallery copied": [],
        "the copy has another item 'k100' than the gallery copied": [item(100, uri="other")],
    }.items():

        def losing(gallery: Gallery, items: list[GalleryItem], stored: Any = stored) -> list[int]:
            return upsert(gallery, [*(it for it in items if it.key != "k100"), *stored])

        monkeypatch.setattr(Gallery, "upsert", losing)
        with pytest.raises(Mismatch, match=message):
            copied("birds", "copy", galleries=memory)
        with GalleryDirectory(memory, policy=MANUAL) as directory:
            assert directory.names() == ["birds", "copy.unfinished"]


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


def test_a_copy_that_was_killed_goes_on(memory: Path) -> None:
    here, there = memory / "here/birds", memory / "there/copy"
    filled(here.parent, "birds")
    killed = subprocess.run([sys.executable, "-c", KILLED, here, there], check=False)
    assert killed.returncode == -signal.SIGKILL
    with GalleryDirectory(there.parent, policy=MANUAL) as directory:
        assert directory.names() == ["copy.unfinished"]
        directory.get("copy.unfinished").upsert([item(8, label="damaged"), GalleryItem("z", item(0).vector)])
    assert told(copied(here, there)) == (ITEMS, ITEMS - 150 + 1, 1)
    assert contents(there) == contents(here)
