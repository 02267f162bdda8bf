"""The search command against a real server."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

import crossbatch
from serving import search
from serving.client import Client, Item
from serving.errors import BadImage, NotFound
from serving.gallery.directory import GalleryDirectory
from serving.rpc.keys import add_key
from tests.serving.rpc_fakes import FakeEncoder, serving

KEY_7 = ["search", "--gallery", "birds", "--key", "item 7", "--address"]


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with serving(FakeEncoder(), GalleryDirectory(tmp_path)) as running, Client(running.address) as client:
        client.create("birds")
        items = [
            Item(f"item {i}", image=b"%d" % i, label="a" * (i // 2), uri=f"file:{i}", metadata={"n": i})
            for i in range(12)
        ]
        client.upsert("birds", items)
        yield client


def asked(client: Client, **settings: Any) -> dict[str, Any]:
    address = client.address
    return search.run(search.Settings.model_validate({"gallery": "birds", "address": address} | settings))


def test_a_photo_is_searched_for(client: Client, tmp_path: Path) -> None:
    photo = tmp_path / "photo.jpg"
    photo.write_bytes(b"7")
    result = asked(client, photo=photo, k=3)
    assert (result["photo"], result["key"], result["gallery"]) == (str(photo), None, "birds")
    assert [hit["rank"] for hit in result["hits"]] == [1, 2, 3]
    assert result["hits"][0] == {
        "rank": 1, "score": 1.0, "label": "aaa", "key": "item 7", "version": 8, "uri": "file:7",
        "metadata": {"n": 7},
    }  # fmt: skip
    head, *lines = search.render(result).splitlines()
    assert head.split() == ["rank", "score", "label", "key"]
    assert lines[0].split() == ["1", "1.0000", "aaa", "item", "7", "file:7"]
    assert len({line.index("item") for line in lines} | {head.index("key")}) == 1  # aligned
    assert asked(client, photo=photo, k=1, model="fake")["hits"][0]["key"] == "item 7"
    with pytest.raises(NotFound, match="nobody"):
        asked(client, photo=photo, model="nobody")


def test_a_bad_query_is_told_by_its_file_or_key_and_not_by_its_number(client: Client, tmp_path: Path) -> None:
    with pytest.raises(BadImage, match=r"nothing\.jpg"):
        asked(client, photo=tmp_path / "nothing.jpg")
    photo = tmp_path / "notes.txt"
    photo.write_bytes(b"bad")
    with pytest.raises(BadImage, match=f"^{photo}: "):
        asked(client, photo=photo)
    with pytest.raises(NotFound, match=r"^there is no item 'nobody'"):
        asked(client, key="nobody")


def test_an_item_is_searched_for_by_conditions_and_left_out_itself(client: Client) -> None:
    result = asked(client, key="item 7", exclude=["item 3"])
    assert {hit["key"] for hit in result["hits"]} == {f"item {i}" for i in range(12)} - {"item 7", "item 3"}
    hits = asked(client, key="item 7", filter='{"n": {"$gte": 3, "$lt": 9}}')["hits"]
    assert {hit["metadata"]["n"] for hit in hits} == {3, 4, 5, 6, 8}
    labels = [hit["label"] for hit in asked(client, key="item 7", group_by_label=True)["hits"]]
    assert len(set(filter(None, labels))) == len(list(filter(None, labels))) == 5
    for hit in asked(client, key="item 7", minimum_score=0.1)["hits"]:
        assert hit["score"] >= 0.1
    nothing = asked(client, key="item 7", filter='{"n": {"$gt": 90}}')
    said = "the gallery birds holds no item that passes the filter, or none near enough to item 7"
    assert search.render(nothing) == said


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, "either a PHOTO or --key"),
        ({"photo": "a.jpg", "key": "a"}, "either a PHOTO or --key"),
        ({"key": "a", "filter": "{brand: acme}"}, "it is no JSON"),
        ({"key": "a", "filter": '{"n": {"$less": 1}}'}, "did you mean"),
        ({"key": "a", "filter": "[" * 100_000}, "filter"),
        ({"key": "a", "minimum_score": 2}, "minimum_score"),
    ],
)
def test_what_makes_no_sense_is_said_before_anything_is_asked(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        search.Settings.model_validate({"gallery": "birds"} | settings)


def test_metadata_is_shown_when_it_is_asked_for(client: Client) -> None:
    client.upsert("birds", [Item("item 5", image=b"5", label="b", metadata={"n": [1, "ü"], "name": "a\nb"})])
    head, *lines = search.render(asked(client, key="item 7", column=["name", "n"], k=11)).splitlines()
    assert head.split() == ["rank", "score", "label", "name", "n", "key"]
    cells = {line[head.index("key") :].split("  ")[0]: line for line in lines}
    shown = cells["item 5"][head.index("name") : head.index("key")]
    assert [shown[:3], shown[3:].strip()] == ["a b", '[1, "ü"]']
    assert cells["item 3"][head.index("n ") - 1 : head.index("key")].split() == ["3"]


def test_a_field_that_no_hit_has_is_told(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    client.upsert("birds", [Item("item 5", image=b"5", metadata={"price": 3})])
    words = [*KEY_7, client.address, "-k", "11"]
    assert crossbatch.main([*words, "--column", "pirce", "--column", "n", "--column", "xyz"]) == 0
    told = "no hit has pirce or xyz in its metadata; did you mean price?\n"
    assert capsys.readouterr().err == told
    assert crossbatch.main([*words, "--column", "price", "--column", "n"]) == 0
    assert (
        crossbatch.main([*words, "--column", "xyz", "--filter", '{"n": {"$gt": 90}}']) == 0
    )  # no hit at all
    assert crossbatch.main([*words, "--column", "xyz", "--json"]) == 0  # which shows what there is
    assert capsys.readouterr().err == ""


def test_who_gave_no_key_is_told_how_to_give_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    add_key(tmp_path / "keys.json", "shop", "read")
    with serving(FakeEncoder(), GalleryDirectory(tmp_path / "g"), keys=tmp_path / "keys.json") as running:
        assert crossbatch.main([*KEY_7, running.address]) == 2
        monkeypatch.setenv("CROSSBATCH_SEARCH_API_KEY", "cb_of_old")
        assert crossbatch.main([*KEY_7, running.address]) == 2
    none, wrong = capsys.readouterr().err.splitlines()
    assert "and got none; put one into the variable CROSSBATCH_SEARCH_API_KEY" in none
    assert "does not know the one it was given" in wrong
    assert "Bearer" not in none + wrong


def test_an_api_key_comes_by_a_variable_and_is_never_shown(
    client: Client, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CROSSBATCH_SEARCH_API_KEY", "s3cret of mine")  # with a space: no key
    assert crossbatch.main([*KEY_7, client.address]) == 2
    monkeypatch.setenv("CROSSBATCH_SEARCH_API_KEY", "s3cret")
    assert crossbatch.main([*KEY_7, "shop.example:50051"]) == 2
    assert crossbatch.main([*KEY_7, client.address, "-k", "many"]) == 2
    assert crossbatch.main([*KEY_7, client.address, "--json"]) == 0
    out, said = capsys.readouterr()
    assert "visible ASCII" in said
    assert "plain text" in said
    settings = search.Settings.model_validate({"gallery": "a", "key": "b", "api_key": "s3cret"})
    assert "s3cret" not in f"{out}{said}{settings!r}"


def test_advice_names_the_flags_and_not_the_arguments_of_the_client(
    client: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torn = tmp_path / "key.pem"
    torn.write_text("-----BEGIN PRIVATE KEY-----")
    for given in (
        ["shop.example:1", "--api-key", "s3cret"],
        [client.address, "--tls", "--timeout", "1"],
        [client.address, "--ca", str(tmp_path / "nothing.pem")],
        [client.address, "--certificate", str(torn)],
    ):
        assert crossbatch.main([*KEY_7, *given]) == 2
    transport, plain, ca, pair = capsys.readouterr().err.splitlines()
    assert "use TLS by --tls or --ca, or say --insecure" in transport
    assert "speaks no TLS; leave out --tls, --ca and --certificate" in plain
    assert "--ca cannot be read from" in ca
    assert "--certificate and --private-key belong together" in pair
