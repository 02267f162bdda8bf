"""Which path means which call, and what of a path, a query or a body becomes which field."""

import json
import re
from typing import Any
from urllib.parse import quote, urlencode

import pytest
from google.api import annotations_pb2
from google.protobuf import descriptor_pool
from hypothesis import given
from hypothesis import strategies as st

from protos import gallery_service_pb2 as gallery_pb
from protos import retrieval_service_pb2 as retrieval_pb
from serving.errors import InvalidArgument
from serving.server.server import SERVICES
from serving.web.transcoding import ROUTES, Route, json_of

POOL = descriptor_pool.Default()
ANNOTATED = [
    method
    for name in SERVICES
    for method in POOL.FindServiceByName(name).methods
    if method.GetOptions().HasExtension(annotations_pb2.http)
]


def route(rpc: str, verb: str) -> Route:
    (found,) = [each for each in ROUTES if each.method.name == rpc and each.verb == verb]
    return found


def request(rpc: str, verb: str, path: str, query: str = "", body: Any = None) -> Any:
    found = route(rpc, verb)
    variables = found.variables(path)
    assert variables is not None
    return found.request(variables, query.encode(), b"" if body is None else json.dumps(body).encode())


def test_every_annotated_call_has_a_route_and_no_two_share_one() -> None:
    assert {each.method.full_name for each in ROUTES} == {each.full_name for each in ANNOTATED}
    assert len(ANNOTATED) >= 24
    bindings = sum(
        1 + len(m.GetOptions().Extensions[annotations_pb2.http].additional_bindings) for m in ANNOTATED
    )
    assert len(ROUTES) == bindings
    for each in ROUTES:
        example = re.sub(r"\{[^}]*\}", "x", each.template)
        takers = [
            other for other in ROUTES if other.variables(example) is not None and other.verb == each.verb
        ]
        assert takers == [each], example
        assert each.has_body == (each.verb in ("POST", "PATCH"))


def test_what_the_annotations_may_hold_beyond_this_is_not_used() -> None:
    for method in ANNOTATED:
        rule = method.GetOptions().Extensions[annotations_pb2.http]
        for each in (rule, *rule.additional_bindings):
            assert each.body in ("", "*")
            assert not each.response_body
            assert each.WhichOneof("pattern") in ("get", "post", "patch", "delete", "put")
        assert not method.client_streaming
    assert {each.method.name for each in ROUTES if each.method.server_streaming} == {"BuildIndex"}


@given(st.text(min_size=1))
def test_a_key_of_any_letters_comes_through(key: str) -> None:
    found = request("GetItem", "GET", f"/v1/galleries/shoes/items/{quote(key, safe='')}")
    assert (found.gallery, found.key) == ("shoes", key)


@pytest.mark.parametrize(
    ("written", "key"),
    [("a/b", "a/b"), ("a%2Fb", "a/b"), ("a//b/", "a//b/"), ("a:count", "a:count"), ("a+b", "a+b"),
     ("%25", "%"),     ("a%0Ab", "a\nb"), ("%2E%2E", ".."), ("a%00", "a\0")],
)  # fmt: skip
def test_a_key_may_hold_what_paths_are_made_of(written: str, key: str) -> None:
    assert request("GetItem", "GET", f"/v1/galleries/shoes/items/{written}").key == key


def test_the_verb_belongs_to_the_pattern() -> None:
    assert request("BuildIndex", "POST", "/v1/galleries/shoes:build").name == "shoes"
    assert route("GetGallery", "GET").variables("/v1/galleries/shoes:build") is None
    assert request("GetGallery", "GET", "/v1/galleries/shoes%3Abuild").name == "shoes:build"
    assert route("BuildIndex", "POST").variables("/v1/galleries/shoes%3Abuild") is None
    assert route("GetItem", "GET").variables("/v1/galleries/shoes/items/") is None


def test_a_query_gives_fields() -> None:
    found = request(
        "ListItems", "GET", "/v1/galleries/shoes/items", "page_size=7&key_prefix=a%2F+b&with_vectors=true"
        "&filter.range.field=price&filter.range.most.number=9.5&with_thumbnails=",
    )  # fmt: skip
    assert (found.gallery, found.page_size, found.key_prefix) == ("shoes", 7, "a/ b")
    assert found.with_vectors
    assert found.with_thumbnails
    assert found.filter.range.most.number == 9.5
    repeated = Route(
        POOL.FindMethodByName("crossbatch.v1.RetrievalService.Search"), "GET", "/v1/{gallery}", has_body=False
    )
    query = urlencode([("exclude_keys", "a"), ("exclude_keys", "b"), ("k", 3)]).encode()
    found = repeated.request({"gallery": "g"}, query, b"")
    assert (found.gallery, list(found.exclude_keys), found.k) == ("g", ["a", "b"], 3)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("query", "told"),
    [
        ("sizes=1", "'sizes'"), ("page_size=x", "page_size"), ("page_size=-1", "page_size"),
        ("page_size=1&page_size=2", "given 2 times"), ("gallery=other", "'gallery'"), ("filter=x", "filter"),
        ("filter.size=1", "filter.size"), ("page_size.x=1", "page_size.x"),
        ("with_vectors=yes", "with_vectors"),
        ("filter=x&filter.exists=y", "filter"), ("filter.exists=y&filter=x", "filter"), ("a=%FF", "decode"),
        ("filter.all_of.filters.exists=y", "filters"), (".=1", "'.'"), ("=1", "''"),
        ("filter." + "negated." * 200 + "exists=x", "filter"),
    ],
)  # fmt: skip
def test_a_query_that_is_no_request_is_refused_by_name(query: str, told: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(told)):
        request("ListItems", "GET", "/v1/galleries/shoes/items", query)


def test_a_body_gives_fields_and_the_path_its_own() -> None:
    body = {"queries": [{"image": "YWI="}, {"key": "b"}], "k": 5, "groupByLabel": True, "gallery": "other"}
    found = request("Search", "POST", "/v1/galleries/shoes:search", "", body)
    assert found == retrieval_pb.SearchRequest(
        gallery="shoes", queries=[{"image": b"ab"}, {"key": "b"}], k=5, group_by_label=True
    )
    item = {
        "key": "a",
        "vector": "AAAAAA==",
        "metadata": {"a": [1, {"b": None}]},
        "expected_version": "9007199254740993",
    }
    found = request("UpsertItems", "POST", "/v1/galleries/shoes/items", "", {"items": [item]})
    assert found.items[0].expected_version == 2**53 + 1
    assert request("ReloadModels", "POST", "/v1/models:reload") is not None


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b'{"kk": 1}', '"kk"'), (b'{"filter": {"equals": {}}}', '"equals"'), (b"{", "JSON"),
        (b"[]", "object"), (b"null", "object"), (b'""', "object"), (b"0", "object"), (b" ", "object"),
        (b'{"k": 1.5}', "k"), (b'{"k": "x"}', "k"), (b'{"k": 1, "k": 2}', "duplicate"),
        (b'{"queries": {"key": "a"}}', "queries"), (b'{"queries": [{"key": "a", "image": ""}]}', "oneof"),
        (b'{"\xff', "decode"), (b'{"a":' * 100_000, "nested|recursion"),
        (b'{"k": ' + b"9" * 9_999 + b"}", "k|digits"),
        (b'{"model": "\\ud800"}', "model|surrogate"),
    ],
)  # fmt: skip
def test_a_body_that_is_no_request_is_refused_by_name(body: bytes, told: str) -> None:
    found = route("Search", "POST")
    with pytest.raises(InvalidArgument, match=f"(?i){told}"):
        found.request({"gallery": "shoes"}, b"", body)


def test_a_body_leaves_no_room_for_a_query() -> None:
    with pytest.raises(InvalidArgument, match="'k'"):
        request("Search", "POST", "/v1/galleries/shoes:search", "k=3", {})


@pytest.mark.parametrize("written", ["%FF", "%ED%A0%80", "a%C3"])
def test_a_path_that_is_no_text_is_refused(written: str) -> None:
    with pytest.raises(InvalidArgument, match="decode"):
        request("GetItem", "GET", f"/v1/galleries/shoes/items/{written}")


INNER = ("equal", "value", "range", "least", "number", "string", "all_of", "filters", "negated", "metadata")
NAMES = st.sampled_from(
    sorted({field.name for route in ROUTES for field in route.method.input_type.fields}.union(INNER))
)  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(NAMES | st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(st.sampled_from(ROUTES), JSON, st.text(max_size=30), st.binary(max_size=30))
def test_whatever_comes_is_a_request_or_refused(route: Route, body: Any, text: str, query: bytes) -> None:
    names = re.findall(r"\{(\w+)", route.template)
    variables = {name: quote(text, safe="", errors="surrogatepass") for name in names}
    for sent in (json.dumps(body).encode(), text.encode(errors="surrogatepass")):
        for asked in (query, urlencode({text: "1"}, errors="surrogatepass").encode(), b""):
            try:
                message = route.request(variables, asked, sent)
            except InvalidArgument:
                pass
            else:
                assert type(message).FromString(message.SerializeToString()) is not None


def test_a_reply_is_written_as_envoy_writes_it() -> None:
    hit = retrieval_pb.Hit(key="ü", score=0.1, version=2**53 + 1, vector=b"\0\1")
    hit.metadata.update({"price": 9.5, "size": None})
    told = json_of(retrieval_pb.SearchResponse(results=[{"hits": [hit]}], unknown_fields=["a"]))
    assert json.loads(told) == {
        "results": [
            {"hits": [{"key": "ü", "score": 0.1, "version": "9007199254740993", "vector": "AAE=",
                       "metadata": {"price": 9.5, "size": None}}]}
        ],
        "unknown_fields": ["a"],
    }  # fmt: skip
    assert json_of(gallery_pb.DeleteGalleryResponse()) == "{}"
