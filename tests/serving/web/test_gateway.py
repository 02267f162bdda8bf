"""Calls by JSON over HTTP against a server with a fake encoder: replies, errors, limits, and who may call."""

import base64
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import ANY
from urllib.parse import quote

import grpc
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis
from hypothesis import strategies as st

from protos import gallery_service_pb2 as gallery_pb
from protos.gallery_service_pb2_grpc import GalleryServiceServicer, add_GalleryServiceServicer_to_server
from serving.rpc.keys import add_key
from serving.settings import Settings
from serving.web import gateway
from serving.web.app import Page
from serving.web.gateway import HTTP_STATUS
from serving.web.transcoding import ROUTES, Route
from tests.serving.rpc_fakes import FakeEncoder, until, vector_for
from tests.serving.web.pages import JSON, Browser, paged

HEAD = (
    "POST /v1:embed HTTP/1.1\r\nhost: localhost\r\n"
    "content-type: application/json\r\ncontent-length: 100\r\n\r\n"
)
ODD = [
    "a/b",
    "a?b=c",
    "a#b",
    "a+b c",
    "100%",
    "%2F",
    "ü 鞋",
    "a:count",
    "a\nb\tc",
    "<img src=x>",
    "\U0001f45f",
    "a&b;c",
    "\x7f",
]


def photo(data: bytes) -> str:
    return base64.b64encode(data).decode()


def test_a_gallery_is_filled_searched_changed_and_dropped(shoes: Browser) -> None:
    found = shoes.ok("POST", "/v1/galleries/shoes:search", {"queries": [{"image": photo(b"boot")}], "k": 2})
    best = found["results"][0]["hits"][0]
    assert (best["key"], best["label"], best["version"]) == ("boot", "b", "1")
    assert best["score"] == pytest.approx(1.0, abs=1e-6)
    filtered = {"filter": {"range": {"field": "price", "least": {"number": 1}}}}
    assert shoes.ok("POST", "/v1/galleries/shoes/items:count", filtered) == {"items": "2"}
    assert (
        shoes.ok("PATCH", "/v1/galleries/shoes/items", {"items": [{"key": "boot", "label": "x"}]})["updated"]
        == 1
    )
    assert shoes.ok("GET", "/v1/galleries/shoes/items/boot")["item"]["label"] == "x"
    listed = shoes.ok("GET", "/v1/galleries/shoes/items?page_size=2&key_prefix=")
    assert [each["key"] for each in listed["items"]] == ["boot", "clog"]
    more = shoes.ok(
        "GET", f"/v1/galleries/shoes/items?page_token={quote(listed['next_page_token'], safe='')}"
    )
    assert [each["key"] for each in more["items"]] == ["shoe"]
    assert shoes.ok("POST", "/v1/galleries/shoes/items:delete", {"keys": ["boot"]}) == {"deleted": 1}
    embedded = shoes.ok("POST", "/v1:embed", {"images": [photo(b"sock")]})
    assert base64.b64decode(embedded["results"][0]["vector"]) == vector_for(b"sock").tobytes()
    assert [each["name"] for each in shoes.ok("GET", "/v1/models")["models"]] == ["fake"]
    assert shoes.ok("DELETE", "/v1/galleries/shoes") == {}
    assert shoes.ok("GET", "/v1/galleries") == {}


@pytest.mark.parametrize("key", ODD)
def test_an_item_of_any_key_is_stored_and_found(browser: Browser, key: str) -> None:
    browser.ok("POST", "/v1/galleries", {"name": "shoes"})
    browser.ok("POST", "/v1/galleries/shoes/items", {"items": [{"key": key, "image": photo(b"x")}]})
    for path in {quote(key, safe=""), quote(key, safe="/")}:
        assert browser.ok("GET", f"/v1/galleries/shoes/items/{path}")["item"]["key"] == key
    assert (
        browser.ok("GET", f"/v1/galleries/shoes/items?key_prefix={quote(key, safe='')}")["items"][0]["key"]
        == key
    )


def test_a_build_is_an_array_that_grows(shoes: Browser) -> None:
    told = shoes.ok("POST", "/v1/galleries/shoes:build", {})
    assert told[0]["stage"]
    assert told[-1]["gallery"]["items"] == "3"
    shoes.refused(400, "POST", "/v1/galleries/shoes:build", {"recall": "x"})


class Odd(GalleryServiceServicer):
    """Answers as our server does not in a test."""

    def __init__(self) -> None:
        self.left = threading.Event()

    def BuildIndex(self, request: gallery_pb.BuildIndexRequest, context: Any) -> Iterator[Any]:  # noqa: N802
        if request.name == "endless":
            context.add_callback(self.left.set)
        yield from [gallery_pb.BuildIndexResponse(stage="read", done=each) for each in range(3)]
        if request.name == "endless":
            assert self.left.wait(20)
        if request.name == "failing":
            context.abort(grpc.StatusCode.DATA_LOSS, "half way")

    def ListGalleries(self, request: object, context: Any) -> Any:  # noqa: N802
        return gallery_pb.ListGalleriesResponse(next_page_token="x" * (65 << 20))

    def GetGallery(self, request: object, context: Any) -> Any:  # noqa: N802
        raise ValueError("of its own")


@pytest.fixture
def odd() -> Iterator[tuple[Odd, Browser]]:
    server, servicer = grpc.server(ThreadPoolExecutor(4)), Odd()
    add_GalleryServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with Page(Settings.model_validate({"model": ["m"], "galleries": "g", "web_port": 0})) as page:
        page.start(f"127.0.0.1:{port}")
        yield servicer, Browser(page.address)
    server.stop(0).wait()


def test_a_stream_that_fails_ends_with_its_status(odd: tuple[Odd, Browser]) -> None:
    _, browser = odd
    first = {"stage": "read"}
    assert browser.ok("POST", "/v1/galleries/whole:build", {})[0] == first
    *told, last = browser.ok("POST", "/v1/galleries/failing:build", {})
    assert told == [first, {"stage": "read", "done": "1"}, {"stage": "read", "done": "2"}]
    assert last == {"code": 15, "message": "half way"}


def test_a_stream_shows_what_there_is_and_ends_when_its_reader_leaves(odd: tuple[Odd, Browser]) -> None:
    servicer, browser = odd
    connection = browser.connect()
    connection.request("POST", "/v1/galleries/endless:build", b"{}", JSON)
    reply = connection.getresponse()
    assert reply.read(17) == b'[{"stage":"read"}'
    reply.close()
    connection.close()
    assert servicer.left.wait(10)


def test_what_grpc_itself_says_is_told_too(odd: tuple[Odd, Browser]) -> None:
    _, browser = odd
    assert "ask for less" in browser.refused(400, "GET", "/v1/galleries")
    assert browser.call("GET", "/v1/galleries/a") == (500, {"code": 2, "message": ANY})
    assert browser.call("POST", "/v1:explain", {})[0] == 501


@pytest.mark.parametrize("code", [each for each in grpc.StatusCode if each is not grpc.StatusCode.OK])
def test_each_status_has_the_one_of_http_that_google_gives_it(code: grpc.StatusCode) -> None:
    # google/rpc/code.proto tells for each its "HTTP Mapping".
    given = {
        400: "INVALID_ARGUMENT FAILED_PRECONDITION OUT_OF_RANGE", 401: "UNAUTHENTICATED",
        403: "PERMISSION_DENIED", 404: "NOT_FOUND", 409: "ALREADY_EXISTS ABORTED",
        429: "RESOURCE_EXHAUSTED", 499: "CANCELLED",
        500: "UNKNOWN INTERNAL DATA_LOSS", 501: "UNIMPLEMENTED", 503: "UNAVAILABLE", 504: "DEADLINE_EXCEEDED",
    }  # fmt: skip
    (wanted,) = [status for status, names in given.items() if code.name in names.split()]
    assert HTTP_STATUS.get(code.name, 500) == wanted


def test_errors_are_those_of_the_server(shoes: Browser) -> None:
    assert "nope" in shoes.refused(404, "GET", "/v1/galleries/nope")
    assert "shoes" in shoes.refused(409, "POST", "/v1/galleries", {"name": "shoes"})
    stale = {"items": [{"key": "boot", "label": "x", "expected_version": "7"}]}
    shoes.refused(409, "PATCH", "/v1/galleries/shoes/items", stale)
    status, told = shoes.call("POST", "/v1:embed", {"images": [photo(b"bad")]})
    assert (status, told["code"], told["details"][0]["reason"]) == (400, 3, "BAD_IMAGE")
    assert told["details"][1]["field_violations"][0]["field"] == "images[0]"
    status, told = shoes.call("POST", "/v1:embed", {"images": [photo(b"bug")]})
    assert status == 500
    assert "secret" not in json.dumps(told)
    assert '"kk"' in shoes.refused(400, "POST", "/v1/galleries/shoes:search", {"kk": 1})
    assert "'kk'" in shoes.refused(400, "GET", "/v1/galleries/shoes/items?kk=1")
    status, headers, _ = shoes.ask("GET", "/v1/galleries/shoes", None, x_request_id="mine")
    assert headers["x-request-id"] == "mine"
    _, headers, _ = shoes.ask("GET", "/v1/galleries/nope", None, x_request_id="mine")
    assert headers["x-request-id"] == "mine"


def test_a_path_or_a_verb_that_there_is_not_is_told_as_json(shoes: Browser) -> None:
    assert "docs/api.md" in shoes.refused(404, "GET", "/v1/nothing")
    for path in ("/v1", "/v1/", "/v1x", "/v1/galleries/", "/v1/galleries/a/b", "/v1//galleries"):
        shoes.refused(404, "GET", path)
    status, headers, _ = shoes.ask("PUT", "/v1/galleries/shoes")
    assert (status, headers["allow"]) == (405, "DELETE, GET")
    for verb in ("HEAD", "OPTIONS"):
        assert shoes.ask(verb, "/v1/galleries")[0] == 405


def test_what_is_no_json_by_its_header_makes_no_call(shoes: Browser) -> None:
    body = b'{"keys": ["boot"]}'
    for media in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        told = shoes.ask("POST", "/v1/galleries/shoes/items:delete", body, content_type=media)
        assert told[0] == 415, media
    assert shoes.ask("POST", "/v1/models:reload")[0] == 415
    assert shoes.ok("POST", "/v1/galleries/shoes/items:count", {}) == {"items": "3"}
    media = "Application/JSON; charset=utf-8"
    assert shoes.ask("POST", "/v1/galleries/shoes/items:delete", body, content_type=media)[0] == 200


@pytest.mark.parametrize("site", ["cross-site", "same-site", "nonsense"])
def test_pages_of_other_sites_call_nothing(shoes: Browser, site: str) -> None:
    shoes.refused(403, "DELETE", "/v1/galleries/shoes", sec_fetch_site=site)
    shoes.refused(403, "GET", "/v1/galleries", sec_fetch_site=site)
    for own in ("same-origin", "none"):
        assert shoes.ok("GET", "/v1/galleries/shoes", sec_fetch_site=own)
    _, headers, _ = shoes.ask("GET", "/v1/galleries", None, origin="https://evil.example")
    assert not [name for name in headers if name.startswith("access-control")]


def test_keys_and_roles_are_the_servers(tmp_path: Path, memory: Path) -> None:
    file = tmp_path / "keys.json"
    reads, writes = add_key(file, "web", "read"), add_key(file, "shop", "write")
    with paged(memory, keys=file) as browser:
        status, headers, _ = browser.ask("GET", "/v1/galleries")
        assert (status, headers["www-authenticate"]) == (401, "Bearer")
        browser.refused(401, "GET", "/v1/galleries", authorization="Bearer nonsense")
        browser.refused(401, "GET", "/v1/galleries", authorization="Bearer \xff")
        browser.refused(403, "POST", "/v1/galleries", {"name": "a"}, authorization=f"Bearer {reads}")
        browser.ok("POST", "/v1/galleries", {"name": "a"}, x_api_key=writes)
        assert browser.ok("GET", "/v1/galleries", authorization=f"Bearer {reads}")["galleries"]


def test_who_finds_no_room_is_told_when_to_come_again(memory: Path) -> None:
    encoder = FakeEncoder()
    encoder.encode_gate.clear()
    with paged(memory, encoder, max_in_flight=256) as browser:
        body = {"images": [photo(str(i).encode()) for i in range(256)]}
        first = threading.Thread(target=browser.ok, args=("POST", "/v1:embed", body))
        first.start()
        until(lambda: encoder.decoded)
        status, headers, told = browser.ask("POST", "/v1:embed", json.dumps(body).encode(), **_named(JSON))
        assert (status, json.loads(told)["details"][0]["reason"]) == (429, "OVERLOADED")
        assert int(headers["retry-after"]) >= 1
        encoder.encode_gate.set()
        first.join()


def _named(headers: dict[str, str]) -> dict[str, str]:
    return {name.replace("-", "_"): value for name, value in headers.items()}


def test_a_body_above_the_limit_is_refused_before_it_is_all_there(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway, "MAX_MESSAGE_BYTES", 10_000)
    monkeypatch.setattr(gateway, "MOST_HELD", 20_000)
    assert "10,000" in browser.refused(413, "POST", "/v1:embed", {"images": ["A" * 20_000]})
    with socket.create_connection(("127.0.0.1", browser.port), 10) as endless:
        endless.sendall(HEAD.replace("100", "9999999999").encode() + b"[" * 41_000)
        assert endless.recv(100).startswith(b"HTTP/1.1 413")
    slow = [socket.create_connection(("127.0.0.1", browser.port), 10) for _ in range(2)]
    for each in slow:
        each.sendall(HEAD.replace("100", "9999").encode() + b"[" * 9_000)

    def full() -> bool:
        return browser.call("POST", "/v1:embed", {"images": ["A" * 4_000]})[0] == 429

    until(full)
    for each in slow:
        each.close()
    until(lambda: not full())


def test_a_body_that_is_slow_to_read_or_to_come_is_refused(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = browser.refused(413, "POST", "/v1/galleries/a:search", {"queries": [{}] * 100_001})
    assert "200,000 values" in told
    monkeypatch.setattr(gateway, "BODY_SECONDS", 0.2)
    with socket.create_connection(("127.0.0.1", browser.port), 10) as slow:
        slow.sendall(HEAD.encode() + b"{")
        assert slow.recv(100).startswith(b"HTTP/1.1 408")


def test_a_large_body_of_who_has_no_key_is_not_read(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = add_key(tmp_path / "keys.json", "web", "read")
    body = {"images": [photo(b"boot") * 10_000]}
    with paged(memory, keys=tmp_path / "keys.json") as browser:
        browser.ok("POST", "/v1:embed", body, authorization=f"Bearer {key}")
        monkeypatch.setattr(Route, "request", None)
        browser.refused(401, "POST", "/v1:embed", body, authorization="Bearer nonsense")


def test_a_large_body_leaves_the_loop_to_others(browser: Browser) -> None:
    body = json.dumps({"images": [photo(b"bad" * 100_000)] * 100}).encode()
    slow = threading.Thread(target=browser.ask, args=("POST", "/v1:embed", body), kwargs=_named(JSON))
    longest = 0.0
    slow.start()
    while slow.is_alive():
        began = time.monotonic()
        browser.ok("GET", "/v1/galleries")
        longest = max(longest, time.monotonic() - began)
    assert longest < 5.0


def test_a_browser_that_leaves_ends_its_call(memory: Path) -> None:
    encoder = FakeEncoder()
    encoder.decode_gate.clear()
    with paged(memory, encoder) as browser:
        connection = browser.connect()
        body = json.dumps({"images": [photo(str(i).encode()) for i in range(200)]})
        connection.request("POST", "/v1:embed", body, JSON)
        until(lambda: browser.running())
        connection.close()
        until(lambda: not browser.running())
        encoder.decode_gate.set()
        assert browser.ok("POST", "/v1:embed", {"images": [photo(b"next")]})
        assert len(encoder.decoded) < 100


@pytest.mark.parametrize("sent", ["", "POST /v1:embed HTTP/1.1\r\n", HEAD, HEAD + "{"])
def test_requests_that_break_off_leave_nothing(
    browser: Browser, sent: str, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", browser.port), 10) as connection:
            connection.sendall(sent.encode())
    assert browser.ok("GET", "/v1/galleries") == {}
    assert not [each for each in caplog.records if each.levelname == "ERROR"]


PATHS = st.sampled_from([each.template.partition("{")[0] for each in ROUTES])
LETTERS = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), max_size=20)


@hypothesis(max_examples=150)
@given(st.sampled_from(["GET", "POST", "PATCH", "DELETE", "PUT"]), PATHS, LETTERS, st.binary(max_size=40))
def test_no_request_is_a_fault_of_the_server(
    fuzzed: Browser, verb: str, path: str, rest: str, body: bytes
) -> None:
    for sent in (body, b'{"%s": %s}' % (rest.encode(), body)):
        try:
            status, _, told = fuzzed.ask(verb, path + rest, sent, content_type="application/json")
        except http.client.HTTPException:
            continue
        assert status < 500, (path + rest, sent, told)


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with paged(tmp_path_factory.mktemp("galleries")) as browser:
        yield browser
