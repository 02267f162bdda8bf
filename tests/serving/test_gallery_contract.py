"""What every gallery does, wherever it lies: in a folder, with milvus-lite, on a Milvus server."""

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from serving.errors import AlreadyExists, Conflict, InvalidArgument, ModelMismatch, NotFound, Unsupported
from serving.gallery.item import GalleryItem, ItemChange, Source
from serving.gallery.milvus.differences import DIFFERENCES
from serving.gallery.place import AnyGallery, Galleries, galleries_at
from serving.gallery.search.filter import (
    LABEL,
    AllOf,
    AnyOf,
    Equal,
    Exists,
    Filter,
    In,
    Not,
    Range,
    check_filter,
    check_kinds,
)
from tests.serving.milvus_server import MilvusServer, milvus_lite
from tests.serving.test_filter import FILTERS, elements, holds
from tests.serving.vectors import units

pytestmark = pytest.mark.timeout(func_only=True)  # a server may take a minute to start

D = 8
MADE_FOR: dict[str, Any] = {"model_name": "m", "fingerprint": "f" * 64, "dimension": D}
VECTORS = units(60, D)
VECTORS[50:] = VECTORS[:10]  # ties
ODD = st.sampled_from("\"'\\{}[]%_$\n\r\t/~é\U0001f426\u2028 a") | st.characters(
    exclude_characters="\0", exclude_categories=["Cs"]
)
VALUES = ["a", "ab", "", "1", 1, 0, 0.5, 1e22, True, False, None, "\U00010000", 'q"\\', 2**53 - 1]


@dataclass
class Engine:
    """A place for galleries; `restart` opens it again, after what holds them was killed."""

    name: str
    galleries: Galleries
    restart: Callable[[], Galleries] | None = None

    @property
    def is_milvus(self) -> bool:
        return self.name != "folder"


@pytest.fixture(scope="module", params=["folder", "milvus-lite", "milvus"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("galleries")
    if request.param == "folder":
        with galleries_at(folder) as galleries:
            yield Engine(request.param, galleries, lambda: galleries_at(folder))
    elif request.param == "milvus-lite":
        with milvus_lite(folder / "lite") as address, galleries_at(address) as galleries:
            yield Engine(request.param, galleries)
    else:
        server: MilvusServer = request.getfixturevalue("milvus")

        def restart() -> Galleries:
            server.stop()
            server.start()
            return galleries_at(server.address)

        with galleries_at(server.address) as galleries:
            yield Engine(request.param, galleries, restart)


@pytest.fixture(scope="module")
def stocked(engine: Engine) -> AnyGallery:
    """A gallery that is only read, of `ITEMS`."""
    gallery = engine.galleries.create("stocked", **MADE_FOR)
    gallery.upsert(ITEMS)
    return gallery


@pytest.fixture(scope="module")
def scratch(engine: Engine) -> AnyGallery:
    return engine.galleries.create("scratch", **MADE_FOR)


@pytest.fixture
def gallery(scratch: AnyGallery) -> AnyGallery:
    """An empty gallery."""
    scratch.delete([item.key for item in scratch.by_key()])
    return scratch


def made() -> list[GalleryItem]:
    rng = np.random.default_rng(0)

    def value() -> Any:
        if rng.random() < 0.3:
            return [VALUES[i] for i in rng.integers(len(VALUES), size=rng.integers(4))]
        return {"deep": [1]} if rng.random() < 0.1 else VALUES[rng.integers(len(VALUES))]

    return [
        GalleryItem(
            f"key {99 - n}", vector, ["", "a", "b", "ab"][n % 4], f"file:///{n}",
            {name: value() for name in ("a", "b", "", "é", 'it"s') if rng.random() < 0.6},
        )
        for n, vector in enumerate(VECTORS)
    ]  # fmt: skip


ITEMS = made()
BY_KEY = {item.key: item for item in ITEMS}


def best(
    query: Any, items: list[GalleryItem], k: int, *, least: float = -1.0, by_label: bool = False
) -> list[tuple[str, float]]:
    """The definition of a search, by a loop."""
    scored = [(round(float(np.dot(np.float64(query), item.vector)), 6), item) for item in items]
    ranked = sorted((pair for pair in scored if pair[0] >= least), key=lambda pair: (-pair[0], pair[1].key))
    seen, kept = set[str](), []
    for score, item in ranked:
        group = item.label or f"key {item.key}"
        if not by_label or group not in seen:
            kept.append((item.key, score))
        seen.add(group)
    return kept[:k]


def found(gallery: AnyGallery, query: Any, k: int, **options: Any) -> list[tuple[str, float]]:
    (hits,) = gallery.search([query], k, **options)
    for hit in hits:
        assert (hit.label, hit.uri, hit.metadata) == as_stored(BY_KEY[hit.key])
    return [(hit.key, round(hit.score, 6)) for hit in hits]


def as_stored(item: GalleryItem) -> tuple[str, str, Mapping[str, Any]]:
    return item.label, item.uri, item.metadata


def near(pairs: list[tuple[str, float]]) -> list[tuple[str, Any]]:
    return [(key, pytest.approx(score, abs=2e-6)) for key, score in pairs]


def test_items_come_back_as_they_were_written_replaced_and_changed(gallery: AnyGallery) -> None:
    source = Source("file:///data", 7, 2**62, b"\1" * 32)
    metadata = {"n": 1, "x": 0.1, "l": [1, None, "é\n"], "o": {"p": {}}, 'q"\\/~': "\U0001f426"}
    first = GalleryItem("a/1", VECTORS[0], "shoe", "http://x", metadata, source)
    versions = gallery.upsert([first, GalleryItem("b", VECTORS[1])])
    assert 0 < versions[0] < versions[1]
    (read,) = gallery.get(["a/1"])
    assert replace(read, vector=first.vector) == replace(first, version=versions[0])
    assert read.vector.tobytes() == first.vector.tobytes()
    assert gallery.find(["b", "no"]).keys() == {"b"}
    with pytest.raises(NotFound, match=r"there is no item 'no' in the gallery scratch \(nor are 1 more\)"):
        gallery.get(["b", "no", "nor"])

    moved = replace(source, origin="file:///moved")
    gallery.touch({"a/1": moved, "b": source})
    gallery.touch({"a/1": replace(source, origin="file:///other", digest=b"\2" * 32)})
    (read,) = gallery.get(["a/1"])
    assert (read.source, read.version) == (moved, versions[0])
    (changed,) = gallery.update([ItemChange("a/1", {"n": None, "y": True}, label="boot")])
    assert changed > versions[1]
    (read,) = gallery.get(["a/1"])
    assert (read.label, read.uri, "n" in read.metadata, read.metadata["y"]) == (
        "boot",
        "http://x",
        False,
        True,
    )
    assert read.source is not None
    assert read.source.given.startswith('["shoe"')  # what its file gave
    gallery.touch({"a/1": source})
    assert gallery.get(["a/1"])[0].source == replace(source, given=read.source.given)
    assert read.vector.tobytes() == first.vector.tobytes()
    with pytest.raises(NotFound, match="there is no item 'no'"):
        gallery.update([ItemChange("no")])

    (again,) = gallery.upsert([GalleryItem("a/1", VECTORS[2])])
    assert again > changed
    (read,) = gallery.get(["a/1"])
    assert (read.label, read.metadata, read.source) == ("", {}, None)  # another picture is from another file
    assert gallery.count() == 2
    assert gallery.delete(["a/1", "no", "a/1"]) == 1
    assert (gallery.count(), gallery.info().items, gallery.find(["a/1"])) == (1, 1, {})
    assert [hit.key for hit in gallery.search([VECTORS[2]], 5)[0]] == ["b"]


def test_hits_are_ranked_ties_by_key_and_cut_at_the_minimum(stocked: AnyGallery) -> None:
    queries = units(5, D, seed=1)
    for query, hits in zip(queries, stocked.search(queries, 60), strict=True):
        assert [(hit.key, hit.score) for hit in hits] == near(best(query, ITEMS, 60))
        least = hits[3].score
        cut = stocked.search([query], 7, minimum_score=least - 1e-6)[0]
        assert [hit.key for hit in cut] == [hit.key for hit in hits if hit.score >= least]
    assert found(stocked, VECTORS[3], 5) == near(best(VECTORS[3], ITEMS, 5))  # the first two tie
    (hits,) = stocked.search([VECTORS[3]], 1, with_vectors=True)
    assert hits[0].vector is not None
    assert hits[0].vector.tobytes() == VECTORS[3].tobytes()
    assert hits[0].version == stocked.get([hits[0].key])[0].version
    assert stocked.search(np.empty((0, D), np.float32), 3) == []


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(filter=Equal("a", 1))
@example(filter=Equal("a", "1"))
@example(filter=Equal("a", True))
@example(filter=Range("a", above="a", most="ab"))
@example(filter=Not(In("a", ("", -0.0, False))))
@example(filter=AnyOf((Equal("b", 'q"\\'), Range("b", least=0.5))))
@given(filter=FILTERS)
def test_a_filter_finds_what_a_loop_does(engine: Engine, stocked: AnyGallery, filter: Filter) -> None:
    check_filter(filter)
    meant = as_declared(filter) if engine.is_milvus else filter
    expected = {item.key for item in ITEMS if holds(item.label, item.metadata, meant)}
    try:
        check_kinds(filter, kinds_of)
        refused = False
    except InvalidArgument:
        refused = not engine.is_milvus or not expected
    assert engine.is_milvus <= (DIFFERENCES.keys() >= {"kinds", "lists in ranges"})
    calls: list[Callable[[], set[str] | int]] = [
        lambda: {item.key for item in stocked.matching(filter)},
        lambda: {hit.key for hit in stocked.search(VECTORS[:1], 60, filter=filter)[0]},
        lambda: stocked.count(filter),
    ]
    for call in calls:
        if refused:
            with pytest.raises(InvalidArgument, match="the filter compares the field"):
                call()
        else:
            assert call() in (expected, len(expected))


def as_declared(filter: Filter) -> Filter:
    """A range of two bounds, as `DIFFERENCES` tells of lists."""
    match filter:
        case Range(field, above, least, below, most):
            bounds = {"above": above, "least": least, "below": below, "most": most}
            return AllOf(tuple(Range(field, **{name: it}) for name, it in bounds.items() if it is not None))
        case Not(inner):
            return Not(as_declared(inner))
        case AllOf(filters):
            return AllOf(tuple(map(as_declared, filters)))
        case AnyOf(filters):
            return AnyOf(tuple(map(as_declared, filters)))
    return filter


def kinds_of(field: str) -> frozenset[str] | None:
    held = [each for item in ITEMS for each in elements(item.label, item.metadata, field)]
    names = {bool: "boolean", int: "number", float: "number", str: "string"}
    return frozenset(names[type(each)] for each in held if type(each) in names) if held else None


def test_hits_are_one_of_each_label_and_without_what_is_excluded(stocked: AnyGallery) -> None:
    for query in units(3, D, seed=2):
        assert found(stocked, query, 20, group_by_label=True) == near(best(query, ITEMS, 20, by_label=True))
        (first, _), (second, _) = best(query, ITEMS, 2)
        others = [item for item in ITEMS if item.key not in (first, second)]
        assert found(stocked, query, 5, exclude=[first, second, "no"]) == near(best(query, others, 5))
        some = [item for item in ITEMS if holds(item.label, item.metadata, Exists("a"))]
        few = found(stocked, query, 3, filter=Exists("a"), group_by_label=True, minimum_score=0.0)
        assert few == near(best(query, some, 3, least=0.0, by_label=True))


def test_hits_are_other_than_what_the_query_shows(stocked: AnyGallery) -> None:
    for key in ("key 99", "key 98", "key 45"):  # without a label, with one, tied with another
        item = BY_KEY[key]
        others = [it for it in ITEMS if it.key != key and (not item.label or it.label != item.label)]
        options = {"exclude_same": LABEL, "query_keys": [key]}
        assert found(stocked, item.vector, 10, **options) == near(best(item.vector, others, 10))
    twin = BY_KEY["key 49"]  # of key 99's vector: the first by key is what a photo of both shows
    others = [it for it in ITEMS if it.key != "key 49" and (not twin.label or it.label != twin.label)]
    assert found(stocked, twin.vector, 10, exclude_same=LABEL) == near(best(twin.vector, others, 10))
    none = found(stocked, twin.vector, 10, exclude_same=LABEL, exclude_same_above=1.0, query_keys=["no"])
    assert none == near(best(twin.vector, ITEMS, 10))


def test_items_are_listed_by_key_and_by_version(stocked: AnyGallery) -> None:
    keys = sorted(BY_KEY)
    assert [item.key for item in stocked.by_key()] == keys
    assert [item.key for item in stocked.list(after="key 50", limit=7)] == keys[keys.index("key 50") + 1 :][
        :7
    ]
    assert [item.key for item in stocked.list(prefix="key 5", after="key 52")] == [
        f"key 5{n}" for n in range(3, 10)
    ]
    assert stocked.list(prefix="no") == []
    labelled = [item.key for item in ITEMS if item.label]
    matching = [*stocked.matching(Exists(LABEL))]
    assert [item.key for item in matching] == labelled  # in the order in which they were written
    rest = stocked.matching(Exists(LABEL), after=matching[9].version)
    assert [item.key for item in rest] == labelled[10:]
    assert {as_stored(item)[0] for item in matching} == {"a", "b", "ab"}


def test_a_sample_is_drawn_among_what_matches(stocked: AnyGallery) -> None:
    drawn = [item.key for item in stocked.sample(9, filter=Equal(LABEL, "ab"), seed=3)]
    assert len({*drawn}) == 9
    assert {BY_KEY[key].label for key in drawn} == {"ab"}
    assert [item.key for item in stocked.sample(9, filter=Equal(LABEL, "ab"), seed=3)] == drawn
    assert [item.key for item in stocked.sample(9, filter=Equal(LABEL, "ab"), seed=4)] != drawn
    assert {item.key for item in stocked.sample(99)} == BY_KEY.keys()


def test_fields_and_values_are_counted(stocked: AnyGallery) -> None:
    names = {LABEL, *(name for item in ITEMS for name in item.metadata)}
    expected = {
        name: sum(bool(elements(item.label, item.metadata, name)) for item in ITEMS) for name in names
    }
    assert {field.name: field.items for field in stocked.fields()} == expected
    labels = Counter(item.label for item in ITEMS if item.label)
    counts, distinct = stocked.values(LABEL, limit=2)
    assert [(it.value, it.items) for it in counts] == [("a", labels["a"]), ("ab", labels["ab"])]
    assert distinct == 3
    asked = AllOf((Equal("a", 1), Exists("brnd"), In(LABEL, ("no",))))
    assert stocked.unknown_fields(asked) == ("brnd",)


def test_items_that_are_alike_are_found(stocked: AnyGallery) -> None:
    twins = {tuple(sorted((ITEMS[n].key, ITEMS[50 + n].key))) for n in range(10)}
    assert {(pair.key, pair.other) for pair in stocked.duplicates(0.9999)} == twins
    page = stocked.duplicates_page(0.9999, limit=4)
    assert {(one, other) for one, other, _ in page.pairs} == {
        (ITEMS[n].key, ITEMS[50 + n].key) for n in range(4)
    }
    assert (page.compared, page.items, page.last) == (4, 60, stocked.get([ITEMS[3].key])[0].version)
    rest = stocked.duplicates_page(0.9999, after=page.last, limit=99)
    assert (len(rest.pairs), rest.compared, rest.last) == (10, 60, 0)


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(keys=["\n", "\r", '"', "\\", "\\n", "'", "{a}", "$x", "%", "_", "\U0001f426", "\uffff"])
@given(keys=st.lists(st.text(ODD, min_size=1, max_size=6), min_size=2, max_size=12, unique=True))
def test_a_key_may_be_any_text(gallery: AnyGallery, keys: list[str]) -> None:
    keys = sorted(key for key in keys)
    gallery.delete([item.key for item in gallery.by_key()])
    gallery.upsert([GalleryItem(key, VECTORS[0], source=Source(key, 0, 0, b"")) for key in keys])
    assert [item.key for item in gallery.by_key()] == keys
    assert [item.key for item in gallery.by_key(after=keys[0])] == keys[1:]
    assert [item.key for item in gallery.list(prefix=keys[-1])] == [keys[-1]]
    assert gallery.keys_of(keys[1]) == [keys[1]]
    assert gallery.delete([keys[0]]) == 1
    assert gallery.find(keys).keys() == {*keys[1:]}


def test_keys_of_a_data_set_are_told_in_order(gallery: AnyGallery) -> None:
    keys = [f"{n:02}" for n in range(12)]
    origins = ["file:///a", "file:///b"]
    sources = [Source(origins[n % 2], 1, 1, b"") for n in range(12)]
    items = [GalleryItem(key, VECTORS[0], source=it) for key, it in zip(keys, sources, strict=True)]
    gallery.upsert([*items, GalleryItem("05x", VECTORS[0])])
    assert gallery.keys_of("file:///a", after="03", limit=3) == ["04", "06", "08"]
    assert gallery.keys_of("file:///b") == keys[1::2]


def test_a_condition_on_the_version_holds_or_is_refused(engine: Engine, gallery: AnyGallery) -> None:
    (version,) = gallery.upsert([GalleryItem("a", VECTORS[0])])
    writes: list[Callable[[dict[str, int]], Any]] = [
        lambda expected: gallery.upsert([GalleryItem("a", VECTORS[1])], expected=expected),
        lambda expected: gallery.update([ItemChange("a", label="x")], expected=expected),
        lambda expected: gallery.delete(["a"], expected=expected),
    ]
    if engine.is_milvus:
        assert "expected versions" in DIFFERENCES
    for write in writes:
        with pytest.raises(Unsupported if engine.is_milvus else Conflict, match="version"):
            write({"a": version - 1})
        assert gallery.get(["a"])[0].version == version


def test_another_model_and_another_dimension_are_refused(gallery: AnyGallery) -> None:
    @dataclass
    class Model:
        name: str = "m"
        fingerprint: str = "f" * 64
        fp32_fingerprint: str = ""
        dimension: int = D

    gallery.check_model(Model())  # type: ignore[arg-type]
    gallery.check_model(Model("int8", "a" * 64, "f" * 64))  # type: ignore[arg-type]
    for other in (Model(fingerprint="a" * 64), Model(dimension=D + 1)):
        with pytest.raises(ModelMismatch, match="the gallery scratch holds embeddings of the model m"):
            gallery.check_model(other)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=rf"expected \({D},\) in this gallery"):
        gallery.upsert([GalleryItem("a", VECTORS[0][:7])])
    with pytest.raises(InvalidArgument, match=rf"expected \(queries, {D}\)"):
        gallery.search([VECTORS[0][:7]], 1)
    with pytest.raises(InvalidArgument, match="has norm 2"):
        gallery.upsert([GalleryItem("a", 2 * VECTORS[0])])
    assert gallery.search([VECTORS[0]], 1) == [[]]
    assert math.isclose(np.linalg.norm(VECTORS[0]), 1, abs_tol=1e-6)


def test_writers_of_different_keys_lose_nothing(gallery: AnyGallery) -> None:
    def write(writer: int) -> list[int]:
        return [gallery.upsert([GalleryItem(f"{writer} {n}", VECTORS[n])])[0] for n in range(8)]

    with ThreadPoolExecutor(4) as pool:
        versions = [*pool.map(write, range(4))]
    assert len({version for each in versions for version in each}) == 32
    assert all(each == sorted(each) for each in versions)
    assert gallery.count() == 32
    assert {item.key for item in gallery.by_key()} == {f"{w} {n}" for w in range(4) for n in range(8)}


def test_a_name_is_switched_under_its_readers_given_back_and_dropped(engine: Engine) -> None:
    galleries, done = engine.galleries, threading.Event()
    old, new = "shoes.of_this-year", "shoes-2"
    for name in (old, new):
        galleries.create(name, **MADE_FOR).upsert([GalleryItem(name, VECTORS[0])])
    with pytest.raises(AlreadyExists, match=f"there is already a gallery called {old}"):
        galleries.create(old, **MADE_FOR)

    def read() -> list[str]:
        seen = []
        while not done.is_set():
            seen.append(galleries.using(old, lambda it: it.search([VECTORS[0]], 1)[0][0].key))
        return seen

    with ThreadPoolExecutor(2) as pool:
        reads = [pool.submit(read) for _ in range(2)]
        try:
            galleries.switch(old, new)
            assert [galleries.get(name).list()[0].key for name in (old, new)] == [new, old]
            assert galleries.get(old).info().previous_name == new
            with pytest.raises(AlreadyExists, match="has been switched with"):
                galleries.switch(old, new)
            assert galleries.rollback(old) == new
            assert [galleries.get(name).list()[0].key for name in (old, new)] == [old, new]
        finally:
            done.set()
        assert all({*each.result()} <= {old, new} for each in reads)
    with pytest.raises(NotFound, match="nothing to undo"):
        galleries.rollback(old)

    galleries.drop(old)
    assert {*galleries.names()} & {old, new} == {new}
    with pytest.raises(NotFound, match=f"there is no gallery '{old}'"):
        galleries.get(old)
    galleries.switch(old, new)  # the name is free
    assert {*galleries.names()} & {old, new} == {old}
    assert galleries.get(old).list()[0].key == new
    galleries.drop(old)
    assert not {*galleries.names()} & {old, new}


def test_what_was_written_survives_a_restart(engine: Engine, gallery: AnyGallery) -> None:
    if engine.restart is None:
        assert "milvus-lite" in DIFFERENCES
        pytest.skip("milvus-lite promises no durability")
    gallery.upsert([GalleryItem("a", VECTORS[0], metadata={"n": 1})])
    gallery.delete(["a"])
    (version,) = gallery.upsert([GalleryItem("a", VECTORS[1], metadata={"n": 2})])
    with engine.restart() as again:
        (read,) = again.get("scratch").get(["a"])
        assert (read.metadata, read.version) == ({"n": 2}, version)
        assert [hit.key for hit in again.get("scratch").search([VECTORS[1]], 5)[0]] == ["a"]
        assert again.get("scratch").upsert([GalleryItem("b", VECTORS[2])]) > [version]
    assert gallery.count() == 2  # those who had it open go on
