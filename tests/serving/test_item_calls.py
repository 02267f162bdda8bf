"""The calls on items over real sockets: versions, one item, all of them by page; filters as they travel."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_status import rpc_status
from hypothesis import given, settings
from hypothesis import strategies as st

from protos import gallery_service_pb2 as pb
from protos import retrieval_service_pb2 as retrieval_pb
from serving.engine import galleries as executor
from serving.errors import Conflict, InvalidArgument
from serving.gallery.directory import GalleryDirectory
from serving.gallery.gallery import Gallery, GalleryItem
from serving.gallery.search.filter import AllOf, AnyOf, Equal, Exists, Filter, In, Not, Range
from serving.model.preprocess import open_rgb
from serving.observability.call import Call
from serving.rpc import limits
from serving.rpc.filters import filter_message, filter_of
from serving.rpc.limits import MAX_FILTER_CONDITIONS, MAX_FILTER_LEVELS
from serving.rpc.services import items as calls
from serving.rpc.services.convert import read_items
from serving.rpc.status import from_status
from serving.rpc.wire import bytes_of, plain_of, vector_of
from serving.server.server import Server
from tests.pictures import encoded, picture
from tests.serving.rpc_fakes import DIMENSION, FakeEncoder, serving, vector_for
from tests.serving.stubs import Stubs, connected, image, item, refusal_of

MODEL: dict[str, Any] = {"model_name": "fake", "fingerprint": "a" * 64, "dimension": DIMENSION}


@pytest.fixture
def stubs(stubs: Stubs) -> Stubs:
    stubs.create("birds")
    return stubs


def nested(levels: int) -> Any:
    return [nested(levels - 1)] if levels else 0


def get(stubs: Stubs, key: str, **options: Any) -> Any:
    return stubs.galleries.GetItem(pb.GetItemRequest(**({"gallery": "birds", "key": key} | options)))


def delete(stubs: Stubs, *keys: str, expected: tuple[int, ...] = ()) -> int:
    request = pb.DeleteItemsRequest(gallery="birds", keys=keys, expected_versions=expected)
    return int(stubs.galleries.DeleteItems(request).deleted)


def pages(stubs: Stubs, **options: Any) -> Iterator[pb.ListItemsResponse]:
    request = pb.ListItemsRequest(gallery="birds", **options)
    while True:
        reply = stubs.galleries.ListItems(request, timeout=10)
        yield reply
        if not reply.next_page_token:
            return
        request.page_token = reply.next_page_token


def listed(stubs: Stubs, **options: Any) -> list[pb.StoredItem]:
    return [each for reply in pages(stubs, **options) for each in reply.items]


def conflict_of(call: Callable[[], Any]) -> tuple[str, int, int]:
    with pytest.raises(grpc.RpcError) as failure:
        call()
    error = from_status(rpc_status.from_call(failure.value))
    assert isinstance(error, Conflict)
    return error.key, error.expected, error.found


def test_an_item_is_read_whole(stubs: Stubs) -> None:
    sent = item("a", image=b"a", label="A", uri="file:a")
    sent.metadata.update({"price": 3, "tags": ["x", None]})
    (version,) = stubs.upsert("birds", sent).versions
    reply = get(stubs, "a")
    found = reply.item
    assert (found.key, found.version, found.label, found.uri) == ("a", version, "A", "file:a")
    assert plain_of(found.metadata) == {"price": 3, "tags": ["x", None]}
    np.testing.assert_array_equal(vector_of(found.vector), vector_for(b"a"))
    assert reply.thumbnail == get(stubs, "a", with_thumbnail=True).thumbnail == b""
    assert "'b'" in refusal_of(lambda: get(stubs, "b"), "NOT_FOUND")
    refusal_of(lambda: get(stubs, ""), "INVALID_ARGUMENT", "key")


def test_every_bad_item_is_named_and_nothing_stored(stubs: Stubs, encoder: FakeEncoder) -> None:
    huge, much = item("much"), item("huge")
    huge.metadata.update({"l": [0] * 120_000})
    much.metadata.update({"l": "x" * 70_000})
    rounded = item("rounded")
    rounded.metadata.update({"ids": [2**53 + 1]})
    bad = [
        (item(""), "items[0]"),
        (item("a", label="x" * 1_025), "items[1]"),
        (item("b", vector=b"123"), "items[2].vector"),
        (item("c", vector=bytes_of(np.ones(DIMENSION))), "items[3].vector"),
        (pb.Item(key="d"), "items[4]"),
        (huge, "items[5]"),
        (much, "items[6]"),
        (item("good"), ""),
        (item("good"), "items[8].key"),
        (item("photo", image=b"bad"), ""),
        (item("nothing", image=b""), "items[10].image"),
        (rounded, "items[11]"),
    ]
    fields = [field for _, field in bad if field]
    refusal_of(lambda: stubs.upsert("birds", *(each for each, _ in bad)), "INVALID_ARGUMENT", *fields)
    assert not encoder.decoded  # nothing was spent on the images
    photos = item("good"), item("x", image=b"bad"), item("y", image=b"bad")
    fields = ["items[1].image", "items[2].image"]
    refusal_of(lambda: stubs.upsert("birds", *photos), "INVALID_ARGUMENT", *fields, reason="BAD_IMAGE")
    assert listed(stubs) == []


@pytest.mark.parametrize(
    "values", [[0] * 32_000, [[]] * 21_000, [{}] * 21_000, [{"": 0}] * 9_000, [nested(28)] * 1_100]
)
def test_metadata_within_the_limit_of_json_is_never_too_large_to_travel(values: list[Any]) -> None:
    with_much = item("k")
    with_much.metadata.update({"l": values})
    assert len(read_items([with_much], DIMENSION, Call("")).items) == 1


def test_items_that_come_as_images_get_thumbnails_where_the_gallery_keeps_them(stubs: Stubs) -> None:
    stubs.galleries.CreateGallery(pb.CreateGalleryRequest(name="seen", thumbnail_side=32))
    drawn = encoded(picture(200, 100), "PNG")
    stubs.upsert("seen", item("a", image=drawn), item("b"))
    small = get(stubs, "a", gallery="seen", with_thumbnail=True).thumbnail
    assert open_rgb(small, least=32).size == (32, 16)
    assert get(stubs, "a", gallery="seen").thumbnail == b""
    assert get(stubs, "b", gallery="seen", with_thumbnail=True).thumbnail == b""
    mixed = item("c", image=drawn), item("d", image=b"no picture, though it embeds")
    refusal_of(lambda: stubs.upsert("seen", *mixed), "INVALID_ARGUMENT", "items[1].image", reason="BAD_IMAGE")


def test_a_conditional_write_is_all_or_none_and_names_the_item_in_conflict(stubs: Stubs) -> None:
    (version,) = stubs.upsert("birds", item("a")).versions
    for items, conflict in (
        ([item("new"), item("a", expected_version=version + 1)], ("a", version + 1, version)),
        ([item("a", expected_version=0), item("new")], ("a", 0, version)),
        ([item("new", expected_version=7)], ("new", 7, 0)),
    ):
        assert conflict_of(partial(stubs.upsert, "birds", *items)) == conflict
    assert [(each.key, each.version) for each in listed(stubs)] == [("a", version)]
    newer, made, free = stubs.upsert(
        "birds",
        item("a", label="x", expected_version=version),
        item("new", image=b"n", expected_version=0),
        item("free"),
    ).versions
    assert [each.version for each in listed(stubs)] == [newer, free, made]


def update(stubs: Stubs, *items: pb.ItemUpdate, gallery: str = "birds") -> list[int]:
    reply = stubs.galleries.UpdateItems(pb.UpdateItemsRequest(gallery=gallery, items=items), timeout=10)
    assert reply.updated == len(reply.versions)
    return list(reply.versions)


def change(key: str, /, *, metadata: Any = (), **fields: Any) -> pb.ItemUpdate:
    made = pb.ItemUpdate(key=key, **fields)
    made.metadata.update(dict(metadata))
    return made


def test_texts_change_without_a_model_and_all_else_stays(stubs: Stubs, encoder: FakeEncoder) -> None:
    stubs.galleries.CreateGallery(pb.CreateGalleryRequest(name="seen", thumbnail_side=32))
    sent = item("a", image=encoded(picture(200, 100), "PNG"), label="A", uri="file:a")
    sent.metadata.update({"price": 3, "size": {"eu": 38}, "old": 1})
    stubs.upsert("seen", sent, item("b", label="B"))
    before, runs = get(stubs, "a", gallery="seen", with_thumbnail=True), len(encoder.decoded)
    price = change("a", metadata={"price": 2.5, "old": None, "new": [None]})
    a, b = update(stubs, price, change("b", label="", uri="file:b"), gallery="seen")
    after = get(stubs, "a", gallery="seen", with_thumbnail=True)
    assert (after.item.version, after.item.label, after.item.uri) == (a, "A", "file:a")
    assert plain_of(after.item.metadata) == {"price": 2.5, "size": {"eu": 38}, "new": [None]}
    assert (after.item.vector, after.thumbnail) == (before.item.vector, before.thumbnail)
    found = get(stubs, "b", gallery="seen").item
    assert (found.version, found.label, found.uri) == (b, "", "file:b")
    again = item("a", vector=after.item.vector)  # read and sent back
    stubs.upsert("seen", again)
    assert get(stubs, "a", gallery="seen", with_thumbnail=True).thumbnail == before.thumbnail
    replaced = change("a", metadata={"x": None}, replace_metadata=True)
    assert update(stubs, replaced, gallery="seen")[0] > b
    assert plain_of(get(stubs, "a", gallery="seen").item.metadata) == {"x": None}
    assert len(encoder.decoded) == runs
    (hits,) = (each.hits for each in stubs.search("seen", retrieval_pb.Query(key="b"), k=1).results)
    assert hits[0].uri == "file:b"


def test_an_update_that_cannot_be_made_changes_nothing_and_names_the_item(stubs: Stubs) -> None:
    (version,) = stubs.upsert("birds", item("a")).versions
    good = change("a", label="x")
    unknown = refusal_of(lambda: update(stubs, good, change("b", expected_version=0)), "NOT_FOUND")
    assert unknown.startswith("items[1]: there is no item 'b'")
    much = {str(i): "x" * 1_000 for i in range(64)}
    for bad, says in (
        (change("c", metadata={"l": [0] * 120_000}), "64 KiB"), (change("a", uri="x" * 8_193), "URI"),
        (change("a", metadata=much | {"more": "y" * 2_000}), "limit is 65536"), (change(""), "items[0].key"),
    ):  # fmt: skip
        assert says in refusal_of(partial(update, stubs, bad), "INVALID_ARGUMENT")
    assert "items[1]: the key 'a'" in refusal_of(lambda: update(stubs, good, good), "INVALID_ARGUMENT")
    refusal_of(lambda: update(stubs), "INVALID_ARGUMENT", "items")
    other = change("a", expected_version=version + 1)
    assert conflict_of(lambda: update(stubs, other)) == ("a", version + 1, version)
    assert [(each.version, each.label) for each in listed(stubs)] == [(version, "")]
    assert update(stubs, change("a", expected_version=version))[0] > version


def test_a_write_whose_time_is_over_before_its_turn_changes_nothing(running: Server, stubs: Stubs) -> None:
    stubs.upsert("birds", item("a"))
    request = pb.DeleteItemsRequest(gallery="birds", keys=["a"])
    with ExitStack() as others:
        for _ in range(executor.WRITERS):
            others.enter_context(running.galleries._writers)
        with pytest.raises(grpc.RpcError, match="DEADLINE_EXCEEDED"):
            stubs.galleries.DeleteItems(request, timeout=0.3)
        assert running.interceptor.wait_idle(5)
    assert [each.key for each in listed(stubs)] == ["a"]


def test_items_are_removed_on_condition_of_their_versions(stubs: Stubs) -> None:
    a, b = stubs.upsert("birds", item("a"), item("b")).versions
    assert conflict_of(lambda: delete(stubs, "a", "b", expected=(a, b + 1))) == ("b", b + 1, b)
    assert [each.key for each in listed(stubs)] == ["a", "b"]
    assert delete(stubs, "b", "a", "c", expected=(b, a, 0)) == 2
    short, twice = (1,), (1, 1)
    refusal_of(lambda: delete(stubs, "a", "b", expected=short), "INVALID_ARGUMENT", "expected_versions")
    refusal_of(lambda: delete(stubs, "a", "a", expected=twice), "INVALID_ARGUMENT", "keys")
    refusal_of(lambda: delete(stubs, "a", ""), "INVALID_ARGUMENT")


def test_items_are_listed_by_key_page_by_page(stubs: Stubs) -> None:
    keys = ["a", "a/1", "a/2", "b", "z", "Z", "ä", "日", "😀", "a%", "a_"]
    stubs.upsert("birds", *(item(key, label=key) for key in keys))
    for size in (1, 2, 5, 11, 1_000, 0):
        replies = list(pages(stubs, page_size=size))
        assert [each.key for reply in replies for each in reply.items] == sorted(keys, key=str.encode)
        assert all(len(reply.items) == size for reply in replies[:-1])
        assert not any(each.vector for reply in replies for each in reply.items)
    beginning = [each.key for each in listed(stubs, key_prefix="a", page_size=2)]
    assert beginning == ["a", "a%", "a/1", "a/2", "a_"]
    assert [each.key for each in listed(stubs, key_prefix="a/")] == ["a/1", "a/2"]
    assert listed(stubs, key_prefix="nothing") == []
    for each in listed(stubs, with_vectors=True):
        np.testing.assert_array_equal(vector_of(each.vector), vector_for(each.key.encode()))
    assert limits.DEFAULT_PAGE <= limits.MAX_PAGE


def test_a_page_out_of_bounds_is_refused(stubs: Stubs) -> None:
    tokens = [("page_token", "x" * 1_025), ("page_token", "\0")]
    for field, value in [("page_size", 1_001), ("key_prefix", "ä" * 513), *tokens]:
        refusal_of(partial(listed, stubs, **{field: value}), "INVALID_ARGUMENT", field)


def test_a_page_ends_before_it_outgrows_a_message(stubs: Stubs, monkeypatch: pytest.MonkeyPatch) -> None:
    items = [item(f"{i:02}") for i in range(30)]
    for each in items:
        each.metadata.update({"text": "x" * (60_000 if each.key == "07" else 3_000)})
    stubs.upsert("birds", *items)
    monkeypatch.setattr(calls, "MAX_MESSAGE_BYTES", 65_536 + 20_000)
    replies = list(pages(stubs, page_size=1_000, with_vectors=True))
    assert [each.key for reply in replies for each in reply.items] == [f"{i:02}" for i in range(30)]
    assert all(reply.ByteSize() <= 21_000 or len(reply.items) == 1 for reply in replies)  # one always goes
    assert len(replies) < 10


def test_a_filter_finds_what_fulfils_it_and_one_of_the_wrong_kind_is_refused(stubs: Stubs) -> None:
    items = [item(f"{i}", label="AB"[i % 2]) for i in range(6)]
    for i, each in enumerate(items):
        each.metadata.update({"price": i, "tags": ["red", "new"][: i % 3]})
    stubs.upsert("birds", *items)
    condition = AllOf((Range("price", least=1, below=4), Not(Equal("$label", "B"))))
    hits = stubs.search("birds", image(b"x"), filter=filter_message(condition)).results[0].hits
    assert [hit.key for hit in hits] == ["2"]
    grouped = stubs.search("birds", image(b"x"), group_by_label=True).results[0].hits
    assert sorted(hit.label for hit in grouped) == ["A", "B"]
    wanted = filter_message(Equal("price", "3"))
    said = refusal_of(lambda: stubs.search("birds", image(b"x"), filter=wanted), "INVALID_ARGUMENT", "filter")
    assert "numbers" in said


class Late(GalleryDirectory):
    """Once `armed`, another gallery takes the name just after the one before was looked up."""

    armed = False

    def get(self, name: str) -> Gallery:
        found = super().get(name)
        if self.armed:
            self.armed = False
            with GalleryDirectory(self.path) as operator:  # as another process would
                operator.drop(name)
                operator.create(name, **MODEL).upsert([GalleryItem("a", vector_for(b"a"), "new")])
        return found


def test_no_call_fails_whose_gallery_loses_its_name_meanwhile(encoder: FakeEncoder, tmp_path: Path) -> None:
    galleries = Late(tmp_path)
    with serving(encoder, galleries) as running, connected(running.address) as stubs:
        stubs.create("birds")
        stubs.upsert("birds", item("a", label="old"))
        made: list[Callable[[], Any]] = [
            lambda: stubs.upsert("birds", item("b", image=b"b")),
            lambda: get(stubs, "a"),
            lambda: listed(stubs),
            lambda: stubs.search("birds", image(b"a"), retrieval_pb.Query(key="a")),
            lambda: stubs.galleries.GetGallery(pb.GetGalleryRequest(name="birds")),
            lambda: delete(stubs, "nobody"),  # a write that meets it is carried out where the name is
        ]
        for call in made:
            galleries.armed = True
            call()
            assert not galleries.armed
        assert [each.label for each in listed(stubs)] == ["new"]


Message = retrieval_pb.Filter
names = st.text("abc$\0é😀", max_size=8)
LARGEST = 2**53 - 1  # beyond, two whole numbers are one double
numbers = st.floats(-LARGEST, LARGEST) | st.integers(-LARGEST, LARGEST)
values = names | st.booleans() | numbers
bounds = st.sampled_from([st.text(max_size=4), numbers]).flatmap(
    lambda bound: st.tuples(*[st.none() | bound] * 4).filter(
        lambda four: any(each is not None for each in four)
    )
)
ranges = st.builds(lambda name, four: Range(name, *four), names, bounds)
filters = st.recursive(
    st.builds(Equal, names, values)
    | st.builds(In, names, st.lists(values, max_size=4).map(tuple))
    | st.builds(Exists, names)
    | ranges,
    lambda inner: (
        st.builds(AllOf, st.lists(inner, max_size=3).map(tuple))
        | st.builds(AnyOf, st.lists(inner, max_size=3).map(tuple))
        | st.builds(Not, inner)
    ),
    max_leaves=8,
)


@settings(max_examples=60)
@given(filters)
def test_a_filter_comes_back_as_it_was(condition: Filter) -> None:
    data = filter_message(condition).SerializeToString()
    back = filter_of(Message.FromString(data))
    assert back == condition
    told = [repr(each).count("True") + repr(each).count("False") for each in (back, condition)]
    assert told[0] == told[1]  # since True == 1 == 1.0


value = Message.Value(number=1)


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (Message(), "is empty; give equal"),
        (Message(any_of=Message.Several(filters=[Message()])), "is empty; give equal"),
        (Message(equal=Message.Equal(field="a")), "lacks a value"),
        (Message(among=Message.Among(field="a", values=[value, Message.Value()])), "lacks a value"),
        (Message(range=Message.Range(field="a")), "without bounds on the field 'a'"),
        (Message(range=Message.Range(field="a", most=Message.Value())), "lacks a value"),
        (Message(range=Message.Range(field="a", most=Message.Value(boolean=True))), "expected all numbers"),
        (Message(range=Message.Range(above=Message.Value(number=float("nan")))), "finite"),
        (Message(equal=Message.Equal(value=Message.Value(number=float("inf")))), "finite"),
        (Message(equal=Message.Equal(field="id", value=Message.Value(number=2**53))), "'id' .* as a string"),
        (Message(among=Message.Among(values=[value] * (MAX_FILTER_CONDITIONS + 1))), "more than 1000"),
        (
            Message(all_of=Message.Several(filters=[Message(any_of=Message.Several())] * 1_001)),
            "more than 1000",
        ),
        (Message(among=Message.Among(values=[Message.Value()] * 300_000)), "fewer or shorter"),
    ],
)
def test_a_malformed_filter_is_refused(message: Message, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        filter_of(message)


def test_a_filter_has_so_many_levels_and_parts_at_most() -> None:
    deepest: Filter = Exists("a")
    for _ in range(MAX_FILTER_LEVELS - 1):
        deepest = AllOf((deepest,))
    sent = retrieval_pb.SearchRequest(filter=filter_message(deepest)).SerializeToString()
    assert (
        filter_of(retrieval_pb.SearchRequest.FromString(sent).filter) == deepest
    )  # Protocol Buffers read it, too
    with pytest.raises(InvalidArgument, match="more than 30 levels"):
        filter_of(Message(negated=filter_message(deepest)))
    largest = Not(In("a", tuple(range(MAX_FILTER_CONDITIONS))))
    assert filter_of(filter_message(largest)) == largest
    with pytest.raises(InvalidArgument, match="more than 1000"):
        filter_message(AllOf((largest, Exists("b"))))


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (Not, (5,)), (Not, (None,)), (AllOf, (5,)), (AnyOf, ((None,),)), (AnyOf, (Exists("a"),)), (dict, ()),
        (Equal, (5, 1)), (Equal, ("\udcff", 1)), (Equal, ("a", "\udcff")), (Equal, ("a", None)),
        (Equal, ("a", b"1")), (Equal, ("a", [1])), (Equal, ("a", 1j)), (Equal, ("a", float("nan"))),
        (Equal, ("a", 10**400)), (In, ("a", (1, None))), (In, ("a", 5)), (In, ("a", "b")), (Exists, (5,)),
        (Range, ("a",)), (Range, ("a", 1, "b")), (Range, ("a", float("inf"))), (Range, (None, 1)),
        (Equal, ("a", 2**53)), (Range, ("a", 1.0, None, -(2**60))),
    ],
)  # fmt: skip
def test_what_is_no_filter_is_not_sent(kind: Any, fields: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidArgument):
        filter_message(kind(*fields))
