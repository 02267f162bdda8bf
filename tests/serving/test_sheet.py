"""The contact sheet of a search: one file that asks for nothing, where names stay text whatever they are."""

import os
import re
import sys
import webbrowser
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import pytest
from pydantic import ValidationError

import crossbatch
from serving import search
from serving.client import Client, Hit, Item
from serving.errors import AlreadyExists, NotFound
from serving.gallery.directory import GalleryDirectory
from serving.sheet import contact_sheet
from tests.pictures import encoded, picture
from tests.serving.rpc_fakes import FakeEncoder, serving

EVIL = "</style><script>alert(1)</script>&\"'`{{7*7}}${title}"
UNSEEN = "\u202egpj.exe\u2066\0\x85\ud83d"


def texts(node: Element) -> list[str]:
    return [text for text in (each.strip() for each in node.itertext()) if text]


def sheet(hits: list[Hit], **more: Any) -> Element:
    given: dict[str, Any] = {"gallery": "birds", "columns": [], "about": "All."} | more
    return ElementTree.fromstring(contact_sheet("photo.jpg", b"query", hits, **given))


def cards(page: Element) -> list[Element]:
    return list(page.iter("li"))


def test_the_page_asks_for_nothing_and_runs_nothing() -> None:
    page = sheet([Hit("a", 0.5, thumbnail=b"jpeg")])
    policy = next(meta.attrib["content"] for meta in page.iter("meta") if "http-equiv" in meta.attrib)
    assert "default-src 'none'" in policy
    assert "script" not in policy
    assert "img-src data:;" in policy
    assert "width=device-width" in str([meta.attrib for meta in page.iter("meta")])
    assert not {node.tag for node in page.iter()} & {"script", "link", "iframe", "form", "a", "object"}
    style = "".join(node.text or "" for node in page.iter("style"))
    assert "prefers-color-scheme: dark" in style
    assert not re.search(r"url\(|@import", style)
    assert [b64decode(image.attrib["src"].partition(",")[2]) for image in page.iter("img")] == [
        b"query",
        b"jpeg",
    ]
    assert all(image.attrib["alt"] for image in page.iter("img"))


def test_a_hit_has_score_label_key_uri_and_metadata() -> None:
    metadata = {"price": 3.5, "tags": ["a", "ü"], "name": "boot"}
    hits = [Hit("k/1", 0.98765, "boot", "file:1", metadata), Hit("k/2", -0.25, uri="k/2")]
    asked, first, second = cards(sheet(hits))
    assert texts(asked) == ["query", "photo.jpg"]
    told = ["no picture of hit 1: boot", "0.9877", "boot", "k/1", "file:1", "metadata"]
    assert texts(first) == [*told, "price", "3.5", "tags", '["a", "ü"]', "name", "boot"]
    assert texts(second) == ["no picture of hit 2: k/2", "-0.2500", "k/2"]
    _, first, second = cards(sheet(hits, columns=["name", "none"]))
    assert texts(first)[5:] == ["name", "boot"]
    assert first.find(".//details") is None
    assert texts(second)[-1] == "k/2"


@pytest.mark.parametrize("name", [EVIL, UNSEEN, '" onerror="alert(1)', "a" * 5000])
def test_names_are_text_whatever_they_are(name: str) -> None:
    hit = Hit(name, 1.0, name, f"javascript:{name}", {name: name, "deep": {name: [name]}}, thumbnail=b"jpeg")
    plain, hostile = sheet([Hit("a", 1.0, "b", "c", {"d": "e", "f": {}}, thumbnail=b"jpeg")]), sheet([hit])
    assert [node.tag for node in hostile.iter()] == [node.tag for node in plain.iter()]
    for node, same in zip(hostile.iter(), plain.iter(), strict=True):
        assert node.attrib.keys() == same.attrib.keys()
    drawn = contact_sheet(name, b"", [hit], gallery=name, columns=[name], about=name)
    assert not set(drawn) & set(UNSEEN[:1] + UNSEEN[8:])
    drawn.encode("utf-8")
    told = texts(cards(hostile)[1])
    if name == EVIL:
        assert told[1:3] == [EVIL, EVIL]
    assert max(map(len, told)) < 320


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(webbrowser, "open", lambda address: pytest.fail(f"{address} was opened"))
    with (
        serving(FakeEncoder(), GalleryDirectory(tmp_path / "g")) as running,
        Client(running.address) as client,
    ):
        for name, side in (("birds", 32), ("bare", 0)):
            client.create(name, thumbnail_side=side)
            images = [encoded(picture(48 + i, 32)) for i in range(3)]
            client.upsert(name, [Item(f"item/{i}", image=each) for i, each in enumerate(images)])
        Path("../my photo.jpg").write_bytes(images[1])
        yield client


def asked(client: Client, **settings: Any) -> dict[str, Any]:
    given = {"gallery": "birds", "address": client.address, "photo": Path("../my photo.jpg")}
    return search.run(search.Settings.model_validate(given | settings))


def test_show_writes_the_page_into_the_current_folder_and_prints_its_path(
    client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["search", "../my photo.jpg", "--gallery", "birds", "--address", client.address, "-k", "2"]
    assert crossbatch.main([*words, "--show"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "wrote my_photo.html"
    page = ElementTree.parse("my_photo.html").getroot()
    assert [texts(card)[-1] for card in cards(page)] == [
        "my photo.jpg",
        *(h["key"] for h in asked(client, k=2)["hits"]),
    ]
    pictures = [b64decode(image.attrib["src"].partition(",")[2]) for image in page.iter("img")]
    assert len(pictures) == 3
    assert all(each.startswith(b"\xff\xd8") for each in pictures)
    assert "my photo.jpg in birds" in texts(page)
    assert "The nearest of the gallery birds, by cosine: 2 items." in texts(page)
    assert asked(client, show=True)["page"] == "my_photo-2.html"  # nothing is written over
    assert asked(client)["page"] is None
    assert sorted(os.listdir()) == ["my_photo-2.html", "my_photo.html"]


def test_the_page_is_opened_on_a_terminal_alone(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = list[str]()
    monkeypatch.setattr(webbrowser, "open", opened.append)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    asked(client, page=Path("quiet.html"))
    assert opened == []
    asked(client, show=True, page=Path("out.html"))
    assert opened == [Path("out.html").absolute().as_uri()]
    with pytest.raises(AlreadyExists, match=r"already something at out\.html"):
        asked(client, page=Path("out.html"))
    with pytest.raises(NotFound, match="no folder"):
        asked(client, page=Path("no/out.html"))


def test_an_item_a_bare_gallery_and_a_photo_that_only_the_server_reads(client: Client) -> None:
    page = ElementTree.parse(asked(client, photo=None, key="item/1", show=True)["page"]).getroot()
    assert len(list(page.iter("img"))) == 3  # the item itself, and the two others
    assert Path("1.html").exists()
    page = ElementTree.parse(asked(client, gallery="bare", show=True, column=["x"])["page"]).getroot()
    assert "keeps no thumbnails" in "".join(page.itertext())
    Path("odd.heif").write_bytes(b"of the server's own")
    page = ElementTree.parse(
        asked(client, photo=Path("odd.heif"), show=True, minimum_score=1)["page"]
    ).getroot()
    assert "no picture of the query" in texts(page)
    assert len(cards(page)) == 1
    hostile = Path("..") / f".{EVIL.replace('/', '')}\udcff.jpg"
    hostile.write_bytes(b"1")
    made = Path(asked(client, photo=hostile, show=True)["page"])
    assert re.fullmatch(r"[\w-]+\.html", made.name)
    assert made.exists()


def test_many_photos_have_no_page() -> None:
    for more in ({"show": True}, {"page": "a.html"}):
        with pytest.raises(ValidationError, match="--show and --page are for one photo"):
            search.Settings.model_validate({"gallery": "a", "photo": "b", "out": "c.csv"} | more)
