"""Calls that look at what a gallery has, over real sockets: by filter, drawn, counted, compared."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from protos import gallery_service_pb2 as pb
from protos import retrieval_service_pb2 as retrieval_pb
from serving.gallery.search.filter import Equal, Exists, Range
from serving.rpc.filters import filter_message
from serving.rpc.services import items as calls
from serving.rpc.wire import bytes_of
from tests.pictures import encoded, picture
from tests.serving.rpc_fakes import vector_for
from tests.serving.stubs import Stubs, item, refusal_of

RED = filter_message(Equal("colour", "red"))
Value = retrieval_pb.Filter.Value


@pytest.fixture
def stubs(stubs: Stubs) -> Stubs:
    stubs.create("birds")
    return stubs


def store(stubs: Stubs, keys: list[str], **metadata: Any) -> None:
    items = [item(key, label="L") for key in keys]
    for each in items:
        each.metadata.update(metadata)
    stubs.upsert("birds", *items)


def ask(stubs: Stubs, method: str, **fields: Any) -> Any:
    request = getattr(pb, f"{method}Request")(**({"gallery": "birds"} | fields))
    return getattr(stubs.galleries, method)(request, timeout=10)


def pages(stubs: Stubs, method: str, **fields: Any) -> Iterator[Any]:
    while True:
        reply = ask(stubs, method, **fields)
        yield reply
        if not reply.next_page_token:
            return
        fields["page_token"] = reply.next_page_token


def keys_of(replies: Any) -> list[str]:
    return [each.key for reply in replies for each in reply.items]


def test_items_that_fulfil_a_filter_are_listed_as_they_were_written(stubs: Stubs) -> None:
    store(stubs, ["z", "a", "m"], colour="red")
    store(stubs, ["b"], colour="blue")
    store(stubs, ["k", "a"], colour="red")
    for size in (1, 2, 4, 0):
        replies = list(pages(stubs, "ListItems", filter=RED, page_size=size))
        assert keys_of(replies) == ["z", "m", "k", "a"]
        assert all(len(reply.items) == size for reply in replies[:-1])
        assert len(replies) == -(-4 // (size or 100))  # the last page is not empty
    both = [
        each for reply in pages(stubs, "ListItems", filter=RED, with_vectors=True) for each in reply.items
    ]
    assert both[0].vector == bytes_of(vector_for(b"z"))
    assert dict(both[0].metadata) == {"colour": "red"}
    reading = pages(stubs, "ListItems", filter=RED, page_size=2)
    assert keys_of([next(reading)]) == ["z", "m"]
    store(stubs, ["z"], colour="red")  # it comes again, as it is newer than the token
    assert keys_of(reading) == ["k", "a", "z"]
    everything = filter_message(Exists("$label"))
    assert len(keys_of(pages(stubs, "ListItems", filter=everything))) == 5
    assert keys_of(pages(stubs, "ListItems", filter=filter_message(Exists("no")))) == []


def test_thumbnails_come_with_a_list_where_asked_for(stubs: Stubs) -> None:
    stubs.galleries.CreateGallery(pb.CreateGalleryRequest(name="seen", thumbnail_side=32))
    stubs.upsert("seen", item("a", image=encoded(picture(200, 100), "PNG"), label="L"))
    one = ask(stubs, "GetItem", gallery="seen", key="a", with_thumbnail=True)
    assert one.item.thumbnail == b""
    for method, more in (
        ("ListItems", {}), ("ListItems", {"filter": filter_message(Exists("$label"))}), ("SampleItems", {})
    ):  # fmt: skip
        (told,) = ask(stubs, method, gallery="seen", with_thumbnails=True, **more).items
        assert told.thumbnail == one.thumbnail != b""
        (bare,) = ask(stubs, method, gallery="seen", **more).items
        assert bare.thumbnail == b""


def test_samples_are_of_what_fulfils_the_filter_and_repeat_with_a_seed(stubs: Stubs) -> None:
    store(stubs, [f"r{i}" for i in range(40)], colour="red")
    store(stubs, [f"b{i}" for i in range(40)], colour="blue")
    drawn = ask(stubs, "SampleItems", filter=RED, size=30, seed=7)
    assert drawn == ask(stubs, "SampleItems", filter=RED, size=30, seed=7)
    assert drawn != ask(stubs, "SampleItems", filter=RED, size=30, seed=8)
    assert len({each.key for each in drawn.items}) == 30
    assert {each.key[0] for each in drawn.items} == {"r"}
    assert not any(each.vector for each in drawn.items)
    assert len(ask(stubs, "SampleItems").items) == 80  # of at most 100
    assert ask(stubs, "SampleItems", filter=filter_message(Exists("no"))) == pb.SampleItemsResponse()


def test_fields_and_values_are_counted(stubs: Stubs) -> None:
    assert ask(stubs, "ListFields") == pb.ListFieldsResponse()
    store(stubs, ["a", "b"], price=2.5, tags=["new", "New", "new"])
    store(stubs, ["c"], price=-1, tags=[], box={"x": 1})
    store(stubs, ["d"], price="low", tags=True)
    assert list(ask(stubs, "ListFields").fields) == [
        pb.Field(name="$label", kinds=["string"], items=4),
        pb.Field(name="box", items=1),
        pb.Field(name="price", kinds=["number", "string"], items=4, least=-1, most=2.5),
        pb.Field(name="tags", kinds=["boolean", "string"], items=3),
    ]
    reply = ask(stubs, "ListValues", field="tags")
    assert reply.distinct == 3
    assert [(each.value, each.items) for each in reply.values] == [
        (Value(string="New"), 2), (Value(string="new"), 2), (Value(boolean=True), 1)
    ]  # fmt: skip
    first = ask(stubs, "ListValues", field="price", page_size=1)
    assert (first.values[0].value, first.values[0].items, first.distinct) == (Value(number=2.5), 2, 3)
    begun = ask(stubs, "ListValues", field="tags", prefix="nE")
    assert [each.value.string for each in begun.values] == ["New", "new"]
    assert ask(stubs, "ListValues", field="no") == pb.ListValuesResponse()
    ask(stubs, "DeleteItems", keys=["a", "b", "c"])
    assert [each.name for each in ask(stubs, "ListFields").fields] == ["$label", "price", "tags"]
    assert ask(stubs, "ListValues", field="price").distinct == 1


def test_duplicates_are_told_page_by_page(stubs: Stubs) -> None:
    twins = {"a": "x", "b": "y", "c": "x", "d": "z", "e": "x", "f": "y"}
    stubs.upsert("birds", *(item(key, vector=bytes_of(vector_for(of.encode()))) for key, of in twins.items()))
    list(stubs.galleries.BuildIndex(pb.BuildIndexRequest(name="birds")))
    stubs.upsert("birds", item("g", vector=bytes_of(vector_for(b"y"))))
    every = {frozenset(pair) for pair in ("ac", "ae", "ce", "bf", "bg", "fg")}
    for size in (1, 2, 3, 0):
        replies = list(pages(stubs, "ListDuplicates", above=0.99, page_size=size))
        told = [pair for reply in replies for pair in reply.pairs]
        assert {frozenset((pair.key, pair.other)) for pair in told} == every
        assert [reply.compared for reply in replies] == [
            min(7, (at + 1) * (size or 100)) for at in range(len(replies))
        ]
        assert {reply.items for reply in replies} == {7}
        for reply in replies:
            assert len({frozenset((pair.key, pair.other)) for pair in reply.pairs}) == len(reply.pairs)
            of_page = list(twins | {"g": "y"})[reply.compared - (size or 100) if size else 0 : reply.compared]
            assert {pair.key for pair in reply.pairs} <= {*of_page}
    (whole,) = pages(stubs, "ListDuplicates", above=-1)
    assert len(whole.pairs) == 7 * 6 / 2
    scores = [pair.score for pair in whole.pairs]
    assert scores == sorted(scores, reverse=True)
    assert scores[0] == pytest.approx(1)
    ask(stubs, "DeleteItems", keys=list(twins))
    (last,) = pages(stubs, "ListDuplicates", above=0.5)
    assert (last.compared, last.items, len(last.pairs)) == (1, 1, 0)


def test_what_is_out_of_bounds_is_refused_by_its_field(stubs: Stubs) -> None:
    store(stubs, ["a"], price=1)
    text = filter_message(Equal("price", "1"))
    bad: list[tuple[str, str, dict[str, Any]]] = [
        ("ListItems", "page_size", {"page_size": 1_001, "filter": RED}),
        ("ListItems", "key_prefix", {"key_prefix": "a", "filter": RED}),
        ("ListItems", "filter", {"filter": retrieval_pb.Filter()}),
        ("ListItems", "filter", {"filter": text}),
        ("SampleItems", "size", {"size": 1_001}),
        ("SampleItems", "filter", {"filter": text}),
        ("SampleItems", "filter", {"filter": filter_message(Range("price", least="a"))}),
        ("ListValues", "field", {}),
        ("ListValues", "page_size", {"field": "a", "page_size": 1_001}),
        ("ListValues", "prefix", {"field": "a", "prefix": "ä" * 513}),
        ("ListDuplicates", "page_size", {"page_size": 1_001}),
    ]
    for token in ("a", "-1", "0", "1.5", "١", "9" * 19):
        bad.append(("ListItems", "page_token", {"page_token": token, "filter": RED}))
        bad.append(("ListDuplicates", "page_token", {"page_token": token}))
    bad += [("ListDuplicates", "above", {"above": above}) for above in (1.1, -2.0, float("nan"))]
    for method, field, fields in bad:
        refusal_of(partial(ask, stubs, method, **fields), "INVALID_ARGUMENT", field)
    nowhere: list[Callable[[], Any]] = [
        partial(ask, stubs, "SampleItems", gallery="no"), partial(ask, stubs, "ListFields", gallery="no"),
        partial(ask, stubs, "ListValues", gallery="no", field="a"),
        partial(ask, stubs, "ListDuplicates", gallery="no"),
    ]  # fmt: skip
    for call in nowhere:
        refusal_of(call, "NOT_FOUND")


def test_no_reply_outgrows_a_message(stubs: Stubs, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.tile(vector_for(b"x"), (12, 1))
    many = [item(f"{i:02}" + "k" * 500, vector=bytes_of(row)) for i, row in enumerate(rows)]
    for i, each in enumerate(many):
        each.metadata.update({f"{i:02}" + "f" * 2_000: 1, "text": f"{i:02}" + "x" * 2_000})
    stubs.upsert("birds", *many)
    most = 65_536 + 9_000
    monkeypatch.setattr(calls, "MAX_MESSAGE_BYTES", most)
    filter = filter_message(Exists("text"))
    replies = list(pages(stubs, "ListItems", filter=filter, page_size=12))
    assert keys_of(replies) == [each.key for each in many]
    assert len(replies) == 12
    values = ask(stubs, "ListValues", field="text")
    assert (len(values.values), values.distinct) == (4, 12)
    assert len(ask(stubs, "ListFields").fields) == 4
    assert len(ask(stubs, "SampleItems").items) == 1
    monkeypatch.setattr(calls, "MAX_MESSAGE_BYTES", 20_000)
    replies = list(pages(stubs, "ListDuplicates", above=0.5))
    assert all(reply.ByteSize() <= 20_000 for reply in replies)
    pairs = {frozenset((pair.key, pair.other)) for reply in replies for pair in reply.pairs}
    assert len(pairs) == 12 * 11 / 2
    assert len(replies) > 2
