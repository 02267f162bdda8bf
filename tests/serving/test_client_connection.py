"""How the client reaches a server: addresses, TLS, keys, proxies, servers that go away, limits."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from protos import model_service_pb2 as model_pb
from protos import retrieval_service_pb2 as retrieval_pb
from serving.client.client import Client, Item
from serving.client.security import is_local
from serving.client.step import Call, Plan
from serving.errors import DeadlineExceeded, InvalidArgument, Unavailable
from serving.gallery.directory import GalleryDirectory
from serving.rpc.limits import MAX_MESSAGE_BYTES
from tests.serving.authority import Authority
from tests.serving.rpc_fakes import DIMENSION, FakeEncoder, serving, vector_for
from tests.serving.scripts import scripted

ANSWERS: dict[str, Any] = {
    "GetModel": lambda request: model_pb.GetModelResponse(model=model_pb.Model(name="m"))
}


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.mark.parametrize(
    "address",
    [
        "", "127.0.0.1", "localhost:", ":50051", "127.0.0.1:0", "127.0.0.1:65536", "127.0.0.1:port", "a b:1",
        "http://127.0.0.1:50051", "https://shop.example", "::1:50051", "[::1]", "user@shop.example:1",
        "a/b:1", "127.0.0.1:-1", "127.0.0.1:50051/", "[shop.example:1", "1.2.3.4:५",
    ],
)  # fmt: skip
def test_an_address_that_is_none_is_one_sentence(address: str) -> None:
    with pytest.raises(InvalidArgument, match=r"is not HOST:PORT; write it as 127\.0\.0\.1:50051"):
        Client(address)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1:1",
        "[::1]:1",
        "shop.example:443",
        "dns:///shop:1",
        "unix:/tmp/x",
        "ipv4:127.0.0.1:1",
        "shop-1:80",
    ],
)
def test_an_address_may_be_a_target_of_grpc(address: str) -> None:
    with Client(address) as client:
        assert repr(client) == f"Client('{address}')"


def test_an_api_key_comes_with_every_call() -> None:
    with scripted(ANSWERS) as script:
        with Client(script.address, api_key="s3cret") as client:
            client.model()
            assert "s3cret" not in repr(client)
        with Client(script.address) as client:
            client.model()
    assert [each.get("authorization") for each in script.metadata] == ["Bearer s3cret", None]


def test_an_api_key_does_not_leave_the_machine_in_plain_text_by_accident(authority: Authority) -> None:
    for address in (
        "shop.example:50051",
        "10.0.0.1:50051",
        "[2001:db8::1]:1",
        "dns:///shop:1",
        "localhost.evil:1",
    ):
        with pytest.raises(InvalidArgument, match="plain text") as failure:
            Client(address, api_key="s3cret")
        assert "s3cret" not in str(failure.value)
        Client(address, api_key="s3cret", insecure=True).close()
        Client(address, api_key="s3cret", tls=True).close()
        Client(address, api_key="s3cret", ca=authority.certificate).close()
    for address in (
        "127.0.0.1:1",
        "127.9.9.9:1",
        "localhost:1",
        "[::1]:1",
        "unix:/tmp/socket",
        "ipv6:[::1]:1",
    ):
        assert is_local(address)
        Client(address, api_key="s3cret").close()


@pytest.mark.parametrize("key", ["", "two words", "line\n", "clé", 5, b"bytes"])
def test_a_key_that_cannot_be_sent_is_refused_unseen(key: Any) -> None:
    with pytest.raises(InvalidArgument, match="API key must be") as failure:
        Client("127.0.0.1:1", api_key=key)
    assert not str(key).strip() or str(key) not in str(failure.value)


def test_tls_trusts_the_given_authority_and_no_other(authority: Authority, tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_bytes(authority.certificate)
    own = authority.sign("server")
    credentials = grpc.ssl_server_credentials([(own.key, own.certificate)])
    with scripted(ANSWERS, credentials=credentials) as script:
        for ca in (authority.certificate, tmp_path / "ca.pem", str(tmp_path / "ca.pem")):
            with Client(script.address, ca=ca, api_key="s3cret") as client:
                assert client.model().name == "m"
        wrongs: list[tuple[dict[str, Any], str]] = [
            ({"ca": Authority().certificate}, r"not trusted; give the authority that signed it by ca=\.\.\."),
            ({"tls": True}, "not trusted"),
            ({}, r"hangs up before it answers; if it speaks TLS, give its authority by ca=\.\.\."),
        ]
        for wrong, says in wrongs:
            # A certificate is the same at the next try, where a server that hangs up may be starting.
            ends = {"timeout": 60} if "ca" in wrong or "tls" in wrong else {"timeout": 0.5, "retries": 0}
            began = time.monotonic()
            with Client(script.address, **ends, **wrong) as client, pytest.raises(Unavailable, match=says):
                client.model()
            assert time.monotonic() - began < 20


def test_a_server_without_tls_or_of_another_name_is_told_as_such(authority: Authority) -> None:
    other = authority.sign("server", address="192.0.2.1")
    for credentials, says in (
        (None, r"speak no TLS, and you do; leave out tls=True, ca=\.\.\."),
        (grpc.ssl_server_credentials([(other.key, other.certificate)]), "for another host name; call it by"),
    ):
        began = time.monotonic()
        with (
            scripted(ANSWERS, credentials=credentials) as script,
            Client(script.address, ca=authority.certificate, timeout=60) as client,
            pytest.raises(Unavailable, match=says),
        ):
            client.model()
        assert time.monotonic() - began < 20


def test_mutual_tls_shows_the_clients_certificate(authority: Authority) -> None:
    own, mine, stranger = (
        authority.sign("server"),
        authority.sign("client"),
        Authority().sign("client"),
    )
    credentials = grpc.ssl_server_credentials(
        [(own.key, own.certificate)], authority.certificate, require_client_auth=True
    )
    with scripted(ANSWERS, credentials=credentials) as script:
        shown: dict[str, Any] = {"certificate": mine.certificate, "private_key": mine.key}
        with Client(script.address, ca=authority.certificate, **shown) as client:
            assert client.model().name == "m"
        wrongs: list[dict[str, Any]] = [
            {},
            {"certificate": stranger.certificate, "private_key": stranger.key},
        ]
        for wrong in wrongs:
            with (
                Client(script.address, ca=authority.certificate, timeout=0.5, retries=0, **wrong) as client,
                pytest.raises(Unavailable, match=r"hangs up .* wants a client certificate, give one"),
            ):
                client.model()


def test_what_tls_is_given_is_checked_at_once(authority: Authority, tmp_path: Path) -> None:
    own, other = authority.sign("client"), authority.sign("other")
    certificate = own.certificate
    (tmp_path / "own.key").write_bytes(own.key)
    (tmp_path / "own.pem").write_bytes(own.certificate)
    (tmp_path / "other.key").write_bytes(other.key)
    torn = b"-----BEGIN CERTIFICATE-----\nabc\n-----END CERTIFICATE-----\n"
    wrongs: list[tuple[dict[str, Any], str]] = [
        ({"certificate": certificate}, "belong together"),
        ({"private_key": certificate}, "belong together"),
        ({"ca": tmp_path / "nothing.pem"}, r"ca='.*nothing\.pem' cannot be read \(No such file"),
        ({"ca": b"no certificate"}, r"no certificate in PEM in the bytes of ca=\.\.\."),
        ({"ca": torn}, "no certificate in PEM"),
        ({"ca": tmp_path / "own.key"}, r"a private key and no certificate in the file ca='.*own\.key'"),
        ({"certificate": certificate, "private_key": certificate}, "no private key in the bytes of"),
        (
            {"certificate": tmp_path / "own.pem", "private_key": tmp_path / "other.key"},
            r"own\.pem' and the file .*other\.key' are no certificate and its key",
        ),
        ({"ca": 5}, "must be bytes or a path"),
        ({"ca": "a\0b"}, "cannot be read"),
    ]
    for wrong, says in wrongs:
        with pytest.raises(InvalidArgument, match=says):
            Client("127.0.0.1:1", **wrong)


def test_a_proxy_of_the_environment_does_not_catch_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("grpc_proxy", "https_proxy", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    with scripted(ANSWERS) as script, Client(script.address, retries=0) as client:
        assert client.model().name == "m"


def test_calls_go_on_when_the_server_ages_connections_out() -> None:
    age = [("grpc.max_connection_age_ms", 100), ("grpc.max_connection_age_grace_ms", 50)]
    with scripted(ANSWERS, options=age) as script, Client(script.address) as client:
        until, made = time.monotonic() + 0.6, 0
        while time.monotonic() < until:
            client.model()
            made += 1
    assert len(script.requests) >= made > 20


def test_a_worker_that_dies_is_replaced_by_another_on_its_port() -> None:
    shared = [("grpc.so_reuseport", 1)]
    with scripted(ANSWERS, options=shared) as first, Client(first.address) as client:
        client.model()
        with scripted(ANSWERS, options=shared, port=int(first.address.rpartition(":")[2])) as second:
            first.dies()
            for _ in range(5):
                assert client.model().name == "m"
            assert len(second.requests) == 5


def test_a_client_is_not_used_across_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    with Client("127.0.0.1:1") as client:
        here = os.getpid()
        monkeypatch.setattr(os, "getpid", lambda: here + 1)
        with pytest.raises(InvalidArgument, match="make a client in each process"):
            client.model()
        monkeypatch.undo()


def test_messages_above_4_mib_pass_in_both_directions(tmp_path: Path) -> None:
    with (
        serving(FakeEncoder(), GalleryDirectory(tmp_path)) as running,
        Client(running.address) as client,
    ):
        photo = bytes(6 * 2**20)
        np.testing.assert_array_equal(client.embed([photo])[0], vector_for(photo))
        client.create("birds")
        text = "x" * 62_000
        client.upsert(
            "birds", (Item(f"{i}", vector=vector_for(b"x"), metadata={"text": text}) for i in range(70))
        )
        (hits,) = client.search("birds", keys=["1"], k=70)
        assert sum(len(hit.metadata["text"]) for hit in hits) > 4 * 2**20


def test_a_message_that_is_too_large_is_told_to_be_split() -> None:
    def sent(size: int) -> Plan[Any]:
        return (yield Call(retrieval_pb.EmbedRequest(images=[bytes(size)])))

    with (
        scripted({"Embed": lambda _: retrieval_pb.EmbedResponse()}) as script,
        Client(script.address) as client,
    ):
        client._driver.run(sent(2**20))
        with pytest.raises(InvalidArgument, match=r"larger than [\d,]+ bytes; split the call"):
            client._driver.run(sent(MAX_MESSAGE_BYTES))
        assert len(script.requests) == 1


def test_a_timed_out_client_leaves_no_request_behind(tmp_path: Path) -> None:
    encoder = FakeEncoder()
    with serving(encoder, GalleryDirectory(tmp_path), max_batch=1) as running:
        encoder.encode_gate.clear()
        with Client(running.address) as patient, Client(running.address, timeout=0.2, retries=0) as hasty:
            first = threading.Thread(target=patient.embed, args=([b"first"],))
            first.start()
            deadline = time.monotonic() + 5
            while not encoder.decoded and time.monotonic() < deadline:
                time.sleep(0.005)
            with pytest.raises(DeadlineExceeded):
                hasty.embed([b"late"])
            time.sleep(0.05)  # the server starts its clock a little later
            encoder.encode_gate.set()
            first.join(10)
            patient.embed([b"last"])
    assert encoder.encoded == 2


def test_two_thousand_neighbours_with_metadata_are_no_slower_after_many_queries(tmp_path: Path) -> None:
    with (
        serving(FakeEncoder(), GalleryDirectory(tmp_path)) as running,
        Client(running.address) as client,
    ):
        client.create("birds")
        rng = np.random.default_rng(0)
        vectors = rng.normal(size=(2_000, DIMENSION))
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        client.upsert(
            "birds",
            (
                Item(f"{i}", vector=each, metadata={"i": i, "tags": ["a", "b"]})
                for i, each in enumerate(vectors)
            ),
        )
        (hits,) = client.search("birds", vectors=vectors[:1], k=2_000)  # the first one reads the gallery
        assert len(hits) == 2_000
        began = time.monotonic()
        client.search("birds", vectors=vectors[:1], k=2_000)
        assert time.monotonic() - began < 2
        times = []
        for vector in vectors[:50]:
            began = time.monotonic()
            client.search("birds", vectors=vector[None], k=10)
            times.append(time.monotonic() - began)
        assert np.median(times[-10:]) < 5 * np.median(times[:10]) + 0.01
