"""Many photos searched for at once: in order, in three formats, gone on with where it was cut."""

import csv
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

import crossbatch
from serving import hits, search
from serving.client import Client, Item
from serving.errors import AlreadyExists, BadData, BadSetting, NotFound, Unavailable
from serving.server.server import Server

Ask = Callable[..., dict[str, Any]]


@pytest.fixture
def ask(running: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ask]:
    """Searches for the photos of a folder, 0.jpg to 6.jpg, which are the items but for 3.jpg: it is bad."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hits, "_AT_ONCE", 2)
    Path("photos/more").mkdir(parents=True)
    for i in range(7):
        Path(f"photos/more/{i}.jpg").write_bytes(b"bad" if i == 3 else b"%d" % i)
    Path("photos/notes.md").write_text("none")
    with Client(running.address) as client:
        client.create("birds")
        client.upsert("birds", [Item(f"item {i}", image=b"%d" % i, metadata={"n": i}) for i in range(7)])
        yield lambda out, photo="photos", **more: search.run(
            search.Settings.model_validate(
                {"photo": photo, "gallery": "birds", "out": out, "address": running.address, "k": 2, **more}
            )
        )


def rows(file: Path) -> list[dict[str, Any]]:
    if file.suffix == ".parquet":
        table: list[dict[str, Any]] = pq.read_table(file).to_pylist()
        return table
    with file.open(encoding="utf-8", newline="") as lines:
        if file.suffix == ".csv":
            return [{name: cell or None for name, cell in row.items()} for row in csv.DictReader(lines)]
        return [json.loads(line) for line in lines]


@pytest.mark.parametrize("name", ["hits.parquet", "hits.csv", "hits.jsonl"])
def test_a_row_a_hit_is_written_in_the_order_of_the_photos(ask: Ask, name: str) -> None:
    Path("photos/@eaDir").mkdir()
    result = ask(name)
    counts = {"photos": 7, "resumed": 0, "hits": 12, "errors": 1}
    unread = ["passed over: 1 .md", "left out: 1 @eaDir"]
    assert result == {"gallery": "birds", "out": name, "unread": unread, **counts}
    told = f"wrote 12 hits of 7 photos, to {name}; with an error in the place of hits: 1"
    assert search.render(result).splitlines() == [told, *unread]
    found = rows(Path(name))
    expected = [(f"more/{i}.jpg", rank) for i in range(7) for rank in ([None] if i == 3 else [1, 2])]
    assert [(row["query"], row["rank"] and int(row["rank"])) for row in found] == expected
    numbers = {field: float(found[0].pop(field)) for field in ("rank", "score")}
    assert numbers == {"rank": 1, "score": 1}
    nothing = None if name.endswith("csv") else ""
    assert found[0] == {
        "query": "more/0.jpg", "key": "item 0", "label": nothing, "uri": nothing, "metadata": '{"n": 0}',
        "error": None,
    }  # fmt: skip
    assert (found[6]["key"], found[6]["error"]) == (None, "These bytes hold no image.")
    assert not Path(f"{name}.part").exists()
    with pytest.raises(AlreadyExists, match="already something at"):
        ask(name)
    assert not Path(f"{name}.part").exists()


def test_a_list_names_photos_and_one_without_hits_has_a_row(ask: Ask, tmp_path: Path) -> None:
    lines = b"\xef\xbb\xbfphotos/more/1.jpg\r\n\n%s/photos/more/0.jpg\nno.jpg\n"
    Path("list").write_bytes(lines % bytes(tmp_path))
    ask("hits.csv", "list", filter='{"n": 1}', minimum_score=0.99)
    names = ["photos/more/1.jpg", f"{tmp_path}/photos/more/0.jpg", "no.jpg"]
    assert [(row["query"], row["key"]) for row in rows(Path("hits.csv"))] == [
        (names[0], "item 1"), (names[1], None), (names[2], None),
    ]  # fmt: skip
    assert "cannot be read" in rows(Path("hits.csv"))[2]["error"]


def test_each_photo_is_told_why_it_is_bad_though_all_of_a_call_are(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hits, "_AT_ONCE", 64)
    for i in range(23):
        Path(f"photos/more/{i}.jpg").write_bytes(b"bad")
    assert ask("hits.csv")["errors"] == 23
    assert {row["error"] for row in rows(Path("hits.csv"))} == {"These bytes hold no image."}


def test_a_run_that_was_cut_goes_on_where_it_stopped(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, asked = Client.search, list[str]()
    ask("whole.jsonl")

    def fails(client: Any, *words: Any, images: list[Path], **more: Any) -> Any:
        asked.extend(path.stem for path in images)
        if images[0].stem == "4" and "5" not in asked[:-1]:
            raise Unavailable("It is gone.")
        return whole(client, *words, images=images, **more)

    monkeypatch.setattr(hits, "_CALLS", 1)
    monkeypatch.setattr(Client, "search", fails)
    with pytest.raises(Unavailable, match=r"^It is gone; the same command goes on from what was answered$"):
        ask("hits.jsonl")
    part = Path("hits.jsonl.part")
    assert len(part.read_bytes().splitlines()) == 1 + 4
    with part.open("ab") as file:
        file.write(b'[{"query": "more/4.j')  # as a crash may leave it
    for more in ({"k": 3}, {"photo": "photos/more"}):  # other settings, other photos
        with pytest.raises(BadSetting, match="of no search, or of another"):
            ask("hits.jsonl", **more)
    changed = os.stat("photos/more/0.jpg")
    os.utime("photos/more/0.jpg", (1, 1))  # another photo under the same name
    with pytest.raises(BadSetting, match="of no search, or of another"):
        ask("hits.jsonl")
    os.utime("photos/more/0.jpg", ns=(changed.st_atime_ns, changed.st_mtime_ns))
    with part.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(BadSetting, match="another search writes to"):
            ask("hits.jsonl")
    monkeypatch.setattr(Client, "search", whole)
    result = ask("hits.jsonl")
    assert (result["resumed"], result["hits"]) == (4, 12)
    assert "7 photos, 4 of them before, to hits.jsonl" in search.render(result)
    assert Path("hits.jsonl").read_bytes() == Path("whole.jsonl").read_bytes()
    assert not part.exists()


def test_what_cannot_be_done_is_told_at_once(ask: Ask) -> None:
    Path("empty").mkdir()
    Path("wide").write_text("a.jpg", encoding="utf-16")
    Path("mine.csv.part").write_text("my own notes")
    for error, given, says in (
        (ValidationError, {"out": None}, "is a folder; give the file for its hits by --out"),
        (BadSetting, {"photo": "photos/more/1.jpg"}, "is one photo; give a folder of them"),
        (ValidationError, {"photo": None, "key": "item 1"}, "--out is for many photos"),
        (ValidationError, {"out": "hits.xlsx"}, r"must end in \.parquet or \.csv or \.jsonl"),
        (ValidationError, {"column": ("price",)}, "has all metadata; leave --column out"),
        (NotFound, {"gallery": "no"}, "no"),
        (BadData, {"photo": "empty"}, "empty gives no photo"),
        (BadData, {"photo": "nothing"}, "the list nothing cannot be read"),
        (BadData, {"photo": "wide"}, "the list wide is no UTF-8 text"),
        (BadSetting, {"out": "mine.csv"}, r"mine\.csv\.part is of no search"),
        (Unavailable, {"out": "no/hits.csv"}, "no/hits.csv.part"),
    ):
        with pytest.raises(error, match=says):
            ask(**{"out": "hits.csv", **given})
    words = ["search", "photos", "--gallery", "birds", "--address", "127.0.0.1:1", "--out", "hits.csv"]
    assert crossbatch.main(words) == 2
    assert not Path("hits.csv.part").exists()
    assert Path("mine.csv.part").read_text() == "my own notes"
