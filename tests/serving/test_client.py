"""The Python client against a real server: what goes in, what comes out, what is refused."""

import io
import itertools
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from serving.client import Client, FieldInfo, FieldValues, Hit, Item, StoredItem, ValueCount, requests
from serving.errors import AlreadyExists, BadImage, Conflict, InvalidArgument, ModelMismatch, NotFound
from serving.gallery.directory import GalleryDirectory
from serving.gallery.search.filter import AllOf, Equal, Exists, Range
from serving.model import preprocess
from tests.pictures import encoded, picture
from tests.serving.rpc_fakes import DIMENSION, FakeEncoder, serving, vector_for

ROOT = Path(__file__).resolve().parents[2]
CIRCLE: dict[str, Any] = {}
CIRCLE["self"] = CIRCLE
UNIT = vector_for(b"x")
KEYS = [f"{i}" for i in range(300)]


@pytest.fixture
def client(encoder: FakeEncoder, tmp_path: Path) -> Iterator[Client]:
    galleries = GalleryDirectory(tmp_path)
    galleries.create("theirs", model_name="other", fingerprint="b" * 64, dimension=DIMENSION)
    with serving(encoder, galleries) as running, Client(running.address) as client:
        client.create("birds")
        yield client


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A client of a server that many tests ask for what it refuses; its gallery has one item."""
    galleries = GalleryDirectory(tmp_path_factory.mktemp("shared"))
    with serving(FakeEncoder(), galleries) as running, Client(running.address) as client:
        client.create("birds")
        client.upsert("birds", [Item("a", vector=UNIT)])
        yield client


def bird(key: str, **fields: Any) -> Item:
    return Item(key, vector=vector_for(key.encode()), **fields)


class Trickle(io.RawIOBase):
    """Gives a byte at a time, as what comes over a network may, and never more than so many."""

    def __init__(self, data: Any) -> None:
        self.data = iter(data)

    def read(self, size: int = -1) -> bytes:
        return bytes(itertools.islice(self.data, 1))


def test_images_are_bytes_paths_or_open_files(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "picture.jpg"
    path.write_bytes(b"picture")
    with path.open("rb") as file, path.open("rb", buffering=0) as raw:
        images: list[Any] = [b"picture", path, str(path), bytearray(b"picture"), file, raw]
        images += [io.BytesIO(b"picture"), Trickle(b"picture")]
        vectors = client.embed(images)
    assert vectors.dtype == np.float32
    np.testing.assert_array_equal(vectors, np.stack([vector_for(b"picture")] * 8))
    assert client.embed([]).shape == (0, DIMENSION)
    assert client.upsert("birds", [Item("a", image=str(path))]) == [1]
    assert client.search("birds", images=[str(path)])[0][0].key == "a"
    with pytest.raises(BadImage, match=r"in BufferedReader cannot be read \(read of closed file\)"):
        client.embed([file])
    for wrong in ("no/such/file", Path("no/such/file"), "a\0b", "\udcff", str(tmp_path)):
        with pytest.raises(BadImage, match="cannot be read"):
            client.embed([wrong])


def test_a_file_that_is_too_large_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(100 * 2**30)
    assert requests.MAX_IMAGE_BYTES > preprocess.MAX_BYTES
    with Client("127.0.0.1:1") as client:
        with pytest.raises(BadImage, match=r"large' is larger than the [\d,]+ bytes"):
            client.embed([path])
        monkeypatch.setattr(requests, "MAX_IMAGE_BYTES", 1_000)
        with pytest.raises(BadImage, match="in Trickle is larger than"):
            client.embed([Trickle(itertools.repeat(0))])


def test_what_is_no_image_is_told_what_to_do() -> None:
    class Upload:
        async def read(self, size: int = -1) -> bytes:
            return b""

    given: list[tuple[Any, str]] = [
        ([Upload()], r"Upload, which reads as coroutine\. Of an asynchronous file give `await"),
        ([io.StringIO("text")], "opened in binary mode; found StringIO, which reads as str"),
        ([np.zeros((2, 2, 3))], r"found ndarray\. Encode pixels first, as PNG"),
        *((one, r"images must be a list; .*brackets: images=\[\.\.\.\]") for one in (b"x", "x", Path("x"))),
        *((one, "images must be a list") for one in (5, None, {"a": b"x"}, io.BytesIO(b"x"))),
        *(([one], "An image must be") for one in (5, None, [b"x"])),
    ]
    with Client("127.0.0.1:1") as client:
        for images, says in given:
            with pytest.raises(InvalidArgument, match=says):
                client.embed(images)


def test_the_life_of_a_gallery(client: Client) -> None:
    with pytest.raises(AlreadyExists):
        client.create("birds")
    metadata = {"price": 3, "tags": ["x", 1.5, None, True]}
    items = [Item("a", image=b"a", label="A", uri="file:a", metadata=metadata), bird("b")]
    assert len(client.upsert("birds", items)) == 2
    assert client.gallery("birds").items == 2
    ((hit,),) = client.search("birds", images=[b"a"], k=1)
    assert isinstance(hit, Hit)
    assert (hit.key, hit.label, hit.uri, hit.metadata) == ("a", "A", "file:a", metadata)
    assert isinstance(hit.metadata["price"], int)
    assert hit.score == pytest.approx(1, abs=1e-6)
    by_vector = client.search("birds", vectors=[vector_for(b"a"), vector_for(b"b")], k=1)
    assert [[hit.key for hit in each] for each in by_vector] == [["a"], ["b"]]
    assert [hit.key for hit in client.search("birds", keys=["a"], exclude=["a"])[0]] == ["b"]
    assert client.search("birds", keys=["a"], exclude=["a"], minimum_score=1.0) == [[]]
    numbers: dict[str, Any] = {"k": np.int64(1), "minimum_score": np.float32(0.5)}
    assert client.search("birds", vectors=vector_for(b"a")[None].tolist(), **numbers)[0][0].key == "a"
    missing, found = client.search("birds", keys=["nobody", "a"], on_error="return")
    assert (type(missing), type(found)) == (NotFound, list)
    assert client.delete("birds", ["a", "nobody"]) == 1
    assert [(info.name, info.items, type(info.problem)) for info in client.galleries()] == [
        ("birds", 1, type(None)),
        ("theirs", 0, ModelMismatch),
    ]
    for error, gallery in ((NotFound, "nowhere"), (ModelMismatch, "theirs")):
        with pytest.raises(error):
            client.search(gallery, images=[b"x"])
    model = client.model()
    assert (model.name, model.dimension, model.precision) == ("fake", DIMENSION, "fp32")
    assert client.models() == [model]
    assert client.ready()
    client.delete_gallery("birds")
    assert [info.name for info in client.galleries()] == ["theirs"]


@pytest.mark.parametrize("count", [1, 3, 30])
def test_each_of_many_bad_inputs_has_an_error(shared: Client, count: int) -> None:
    images = [b"bad" if i % 2 else b"" for i in range(count)]
    errors = shared.embed(images, on_error="return")
    assert len(errors) == count
    for i, error in enumerate(errors):
        assert isinstance(error, BadImage)
        says = "hold no image" if i % 2 else "0 bytes"
        assert (says if i < 10 else "like all others of its call") in str(error)
    with pytest.raises(BadImage, match="input 0: "):
        shared.embed(images)


def test_what_takes_several_calls_is_answered_in_order_and_under_their_limits(client: Client) -> None:
    versions = client.upsert("birds", map(bird, KEYS))
    assert {item.key: item.version for item in client.items("birds")} == dict(
        zip(KEYS, versions, strict=True)
    )
    vectors = np.stack([vector_for(b"%d" % i) for i in range(70)])
    found = client.search("birds", vectors=vectors, k=1000)  # more hits than one reply holds
    assert [hits[0].key for hits in found] == KEYS[:70]
    keys = [*KEYS, *(f"gone {i}" for i in range(800))]
    assert client.delete("birds", keys, expected_versions=[*versions, *[0] * 800]) == 300


def test_a_bad_item_of_a_later_call_is_named_by_its_own_place(client: Client) -> None:
    items = [*map(bird, KEYS)]
    items[299] = Item("299", image=b"bad")
    with pytest.raises(BadImage, match=r"items\[299\].image: These bytes hold no image") as failure:
        client.upsert("birds", items)
    assert client.gallery("birds").items == failure.value.stored == 256
    assert (failure.value.code, len(failure.value.request_id)) == ("INVALID_ARGUMENT", 16)


def test_messages_above_4_mib_pass_in_both_directions(client: Client) -> None:
    np.testing.assert_array_equal(client.embed([bytes(6 * 2**20)])[0], vector_for(bytes(6 * 2**20)))
    client.upsert("birds", (bird(f"{i}", metadata={"text": "x" * 62_000}) for i in range(70)))
    (hits,) = client.search("birds", keys=["1"], k=70)
    assert sum(len(hit.metadata["text"]) for hit in hits) > 4 * 2**20


@pytest.mark.parametrize(
    "query",
    [
        {"keys": "abc"}, {"keys": [5]}, {"keys": ["\udcff"]}, {"keys": ["a"], "images": [b"x"]},
        {"vectors": [["a"]]}, {"vectors": [[1.0], [1.0, 2.0]]}, {"vectors": 5}, {"vectors": [[10**400]]},
        {"vectors": [[1j]]}, {"vectors": [[None]]}, {"vectors": [[1e300] * DIMENSION]},
        {"k": -1}, {"k": 0}, {"k": 2_049}, {"k": 10**400}, {"k": "3"}, {"k": 1.5}, {"k": True},
        {"minimum_score": "high"}, {"minimum_score": float("nan")}, {"minimum_score": 1.5},
        {"exclude": "abc"}, {"exclude": [5]}, {"exclude": None}, {"exclude": ["x"] * 1_001}, {"filter": 5},
        {"filter": {"a": None}}, {"filter": {"a": {"$lt": "9", "$gt": 1}}}, {"filter": Equal("$label", 5)},
        {"filter": Equal("a", float("nan"))}, {"filter": [Exists("a")]}, {"filter": Equal("a", "\udcff")},
        {"group_by_label": "yes"}, {"on_error": "ignore"}, {"gallery": None}, {"gallery": "\udcff"},
    ],
)  # fmt: skip
def test_a_search_that_makes_no_sense_is_an_invalid_argument(shared: Client, query: dict[str, Any]) -> None:
    given = {"gallery": "birds"} | query
    if not {"keys", "vectors"} & set(query):
        given["keys"] = ["a"]
    with pytest.raises(InvalidArgument) as failure:
        shared.search(**given)
    assert not str(failure.value).startswith("The server failed")


@pytest.mark.parametrize(
    "fields",
    [
        {"key": 5}, {"key": None}, {"key": "\udcff"}, {"label": 5}, {"uri": "\udcff"}, {"metadata": "abc"},
        {"metadata": [1]}, {"metadata": {1: 2}}, {"metadata": {"x": {1}}}, {"metadata": {"x": 10**400}},
        {"metadata": {"x": "\udcff"}}, {"metadata": {"\udcff": 1}}, {"metadata": CIRCLE},
        {"metadata": {"x": float("nan")}}, {"vector": "abc"}, {"vector": [None]}, {"vector": [[1.0]]},
        {"vector": 5}, {"expected_version": "1"}, {"expected_version": -1}, {"expected_version": 2**64},
        {"vector": None}, {"image": b"x"}, {"vector": None, "image": 5}, {"vector": None, "image": [b"x"]},
        {"metadata": {"x": [-1e17]}},
    ],
)  # fmt: skip
def test_an_item_that_makes_no_sense_is_an_invalid_argument(shared: Client, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        shared.upsert("birds", [Item(**({"key": "b", "vector": UNIT} | fields))])
    assert shared.gallery("birds").items == 1


@pytest.mark.parametrize(
    ("value", "told"), [({1}, r"JSON does not know: sold\.at\[1\] is of set"), (2**53, "at.* as a string")]
)
def test_metadata_that_cannot_travel_is_named_with_its_item(value: Any, told: str) -> None:
    told = f"The item 'boot/1': .*{told}"
    with Client("127.0.0.1:1") as client, pytest.raises(InvalidArgument, match=told):
        client.upsert("birds", [bird("boot/1", metadata={"sold": {"at": [1, value]}})])


def test_values_of_numpy_and_dates_come_as_users_expect(client: Client) -> None:
    day, moment = date(2026, 3, 1), datetime(2026, 3, 1, 12, 30, tzinfo=UTC)
    given = {
        "new": np.bool_(True), "stock": np.int64(3), "price": np.float32(1.5), "day": day, "moment": moment,
        "stamp": np.datetime64("2026-03-01T12:30", "ns"), "sizes": np.arange(38, 40), "days": (day,),
    }  # fmt: skip
    client.upsert(
        "birds", [bird("a", metadata=given), bird("b", metadata={"day": "2025-12-31", "sizes": 38})]
    )
    assert client.get("birds", "a").metadata == {
        "new": True, "stock": 3, "price": 1.5, "day": "2026-03-01", "moment": "2026-03-01T12:30:00+00:00",
        "stamp": "2026-03-01T12:30:00", "sizes": [38, 39], "days": ["2026-03-01"],
    }  # fmt: skip
    for wanted in (
        {"day": {"$gte": date(2026, 1, 1)}}, {"moment": {"$lt": datetime(2026, 4, 1, tzinfo=UTC)}},
        {"new": np.bool_(True)}, {"stock": {"$in": [np.int32(3)]}}, {"sizes": {"$gt": np.float64(38.5)}},
        {"days": day}, Equal("new", cast("Any", np.bool_(True))), Range("day", least=cast("Any", day)),
    ):  # fmt: skip
        found = client.search("birds", keys=["a"], filter=cast("Any", wanted))[0]
        assert [hit.key for hit in found] == ["a"], wanted


@pytest.mark.parametrize("wrong", [5, None, {"key": "a"}, "\udcff"])
def test_whatever_else_makes_no_sense_is_an_invalid_argument(shared: Client, wrong: Any) -> None:
    for call in (
        lambda: shared.upsert("birds", wrong),
        lambda: shared.upsert("birds", [wrong]),
        lambda: shared.upsert(wrong, [Item("a", vector=UNIT)]),
        lambda: shared.delete(wrong, ["a"]),
        lambda: shared.delete("birds", wrong),
        lambda: shared.delete("birds", ["a", "b"], expected_versions=wrong or [1]),
        lambda: shared.create(wrong),
        lambda: shared.create("more", index=wrong or "Nonsense"),
        lambda: shared.create("more", thumbnail_side=1_025 if wrong in (5, None) else wrong),
        lambda: shared.create("more", recall=wrong or 2),
        lambda: shared.gallery(wrong),
        lambda: shared.get("birds", wrong),
        lambda: list(shared.items(wrong)),
        lambda: list(shared.build_index(wrong)),
        lambda: shared.embed([b"x"], model=wrong or cast("str", 5)),
    ):
        with pytest.raises(InvalidArgument):
            call()
    assert [(info.name, info.items) for info in shared.galleries()] == [("birds", 1)]
    assert shared.delete("birds", []) == 0


def test_a_price_changes_without_its_photo(client: Client) -> None:
    client.upsert("birds", (bird(key, label="A", uri="u", metadata={"price": 3, "x": 1}) for key in KEYS))
    versions = client.update("birds", (Item(key, metadata={"price": 2, "x": None}) for key in KEYS))
    found = client.get("birds", "299")
    assert found == StoredItem("299", versions[299], "A", "u", {"price": 2}, found.vector)
    client.update("birds", [Item("0", label="", metadata={"y": None})], replace_metadata=True)
    found = client.get("birds", "0")
    assert (found.label, found.uri, found.metadata) == ("", "u", {"y": None})
    with pytest.raises(NotFound, match=r"items\[300\]: there is no item 'no'") as failure:
        client.update("birds", map(Item, [*KEYS, "no"]))
    assert failure.value.stored == 256
    with pytest.raises(Conflict):
        client.update("birds", [Item("1", label="B", expected_version=1)])
    with pytest.raises(InvalidArgument, match="an update leaves them as they are"):
        client.update("birds", [bird("a")])


def test_read_change_write_loses_no_change(client: Client) -> None:
    (first,) = client.upsert("birds", [bird("a", label="A", uri="file:a", metadata={"stock": 3})])
    mine = client.get("birds", "a", thumbnail=True)
    np.testing.assert_allclose(cast("Any", mine.vector), vector_for(b"a"), atol=1e-7)
    assert mine == StoredItem("a", first, "A", "file:a", {"stock": 3}, mine.vector, b"")
    assert client.search("birds", keys=["a"])[0][0].version == first
    (version,) = client.upsert("birds", [bird("a", metadata={"stock": 2}, expected_version=first)])
    with pytest.raises(Conflict, match="'a'") as failure:
        client.upsert("birds", [bird("a", metadata={"stock": 9}, expected_version=first)])
    error = failure.value
    assert (error.code, error.key, error.expected, error.found) == ("ABORTED", "a", first, version)
    assert client.get("birds", "a").metadata == {"stock": 2}
    with pytest.raises(Conflict):
        client.delete("birds", ["a"], expected_versions=[first])
    assert client.delete("birds", iter(["a"]), expected_versions=iter([version])) == 1
    assert client.upsert("birds", [bird("a", expected_version=0)])[0] > version


def test_items_are_read_over_all_pages_as_needed(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.client.client.MAX_PAGE", 7)
    keys = [f"{kind}/{i:02}" for kind in "ab" for i in range(25)]
    client.upsert("birds", map(bird, keys))
    assert [item.key for item in client.items("birds", prefix="b/")] == keys[25:]
    for item in client.items("birds", vectors=True):
        np.testing.assert_allclose(cast("Any", item.vector), vector_for(item.key.encode()), atol=1e-7)
    reading = client.items("birds")
    assert next(reading).key == "a/00"
    client.delete("birds", keys[7:49])
    assert [item.key for item in reading] == [*keys[1:7], keys[49]]


def test_what_a_gallery_has_is_looked_at(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.client.client.MAX_PAGE", 7)
    made = [bird(f"{i:02}", label="ab"[i % 2], metadata={"price": i % 3, "sale": i > 20}) for i in range(25)]
    client.upsert("birds", [*made[10:], *made[:10], Item("twin", vector=vector_for(b"00"))])
    cheap = [item.key for item in client.items("birds", filter={"price": {"$lt": 1}})]
    assert cheap == ["12", "15", "18", "21", "24", "00", "03", "06", "09"]
    drawn = client.sample("birds", 4, filter=Equal("price", 0), seed=3)
    assert drawn == client.sample("birds", 4, filter={"price": 0}, seed=3)
    assert len({item.key for item in drawn} & {*cheap}) == 4
    assert len(client.sample("birds")) == 26
    assert client.fields("birds") == [
        FieldInfo("$label", ("string",), 25),
        FieldInfo("price", ("number",), 25, 0, 2),
        FieldInfo("sale", ("boolean",), 25),
    ]
    assert client.values("birds", "price", limit=2) == FieldValues((ValueCount(0, 9), ValueCount(1, 8)), 3)
    assert isinstance(client.values("birds", "price").values[0].value, int)
    assert client.values("birds", "$label", prefix="A").values == (ValueCount("a", 13),)
    assert [each.value for each in client.values("birds", "sale").values] == [False, True]
    ((one, other, score),) = {
        (pair.key, pair.other, pair.score) for pair in client.duplicates("birds", 0.9999)
    }
    assert {one, other} == {"00", "twin"}
    assert score == pytest.approx(1)
    with pytest.raises(InvalidArgument, match="field"):
        client.values("birds", "")
    with pytest.raises(InvalidArgument, match="seed"):
        client.sample("birds", seed=-1)


def test_items_come_with_thumbnails_where_asked_for(client: Client) -> None:
    client.create("seen", thumbnail_side=32)
    client.upsert("seen", [Item("a", image=encoded(picture(200, 100), "PNG"), label="A")])
    small = client.get("seen", "a", thumbnail=True).thumbnail
    assert small
    assert [each.thumbnail for each in client.items("seen", thumbnails=True)] == [small]
    assert [each.thumbnail for each in client.items("seen", filter={"$label": "A"}, thumbnails=True)] == [
        small
    ]
    assert [each.thumbnail for each in client.sample("seen", thumbnails=True)] == [small]
    assert [each.thumbnail for each in (*client.items("seen"), *client.sample("seen"))] == [b"", b""]


def test_a_search_takes_filters_of_either_form(client: Client) -> None:
    client.upsert("birds", (bird(f"{i}", metadata={"brand": "acme", "price": i}) for i in range(9)))
    mapping = {"brand": "acme", "price": {"$gte": 2, "$lt": 6}}
    forms: list[Any] = [mapping, AllOf((Equal("brand", "acme"), Range("price", least=2, below=6)))]
    for demanded in forms:
        (hits,) = client.search("birds", keys=["0"], filter=demanded)
        assert {hit.key for hit in hits} == {"2", "3", "4", "5"}


def test_the_client_needs_no_engine() -> None:
    script = (
        "import sys\n"
        "for name in ('torch', 'onnx', 'onnxruntime', 'faiss', 'PIL', 'sqlite3'): sys.modules[name] = None\n"
        "import serving.client, serving.search"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)
