"""Three servers behind Envoy: one is drained and one killed under load, and no caller of a read notices."""

import csv
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1.health_pb2 import HealthCheckResponse

from benchmarks import replicas
from benchmarks.driving.proxy import Proxy, proxied
from benchmarks.simulating.scenarios import capacity
from benchmarks.simulating.times import measured_parts
from protos import retrieval_service_pb2 as pb
from serving.rpc.auth import OURS, ROLES
from serving.rpc.wire import bytes_of
from tests.pictures import encoded, picture
from tests.serving.indexed import index
from tests.serving.processes import Launched, launched
from tests.serving.rpc_fakes import until
from tests.serving.stubs import Stubs

HEALTH = "/grpc.health.v1.Health/Check"
HEALTHY: bytes = HealthCheckResponse(status=HealthCheckResponse.SERVING).SerializeToString()
CALLERS = 9
PHOTO = encoded(picture(1200, 900), "JPEG")  # takes a while to decode, so that calls are in flight everywhere


@contextmanager
def connected(address: str) -> Iterator[Stubs]:
    """A channel that tries nothing again by itself."""
    with grpc.insecure_channel(address, [("grpc.enable_retries", 0)]) as channel:
        yield Stubs(channel)


@contextmanager
def load(address: str) -> Iterator[Counter[str]]:
    """Callers that embed and search in turns, one call after another; yields how many ended in which way."""
    ends, done = Counter[str](), threading.Event()
    vector = pb.Query(vector=bytes_of(np.array([0.6, 0.8, 0.0], np.float32)))

    def call() -> None:
        with connected(address) as stubs:
            while not done.is_set():
                try:
                    assert len(stubs.embed(*[PHOTO] * 4, timeout=20).results) == 4
                    assert len(stubs.search("shop", vector, k=3).results[0].hits) == 3
                    ends["OK"] += 1
                except grpc.RpcError as error:
                    ends[f"{error.code()}: {error.details()}"] += 1

    with ThreadPoolExecutor(CALLERS) as pool:
        asked = [pool.submit(call) for _ in range(CALLERS)]
        try:
            yield ends
        finally:
            done.set()
    for each in asked:
        each.result()


def used(proxy: Proxy, address: str, more: int = 6) -> None:
    """Wait until a server has got so many calls more."""
    before = proxy.hosts()[address].calls
    until(lambda: proxy.hosts()[address].calls >= before + more, 20)


def test_one_is_drained_and_one_is_killed_and_no_call_fails(model: Path, data: Path, tmp_path: Path) -> None:
    galleries = tmp_path / "galleries"
    index(model, data, galleries / "shop")
    words = ("--threads", "1", "--drain-delay", "4", "--grace", "5")

    def start(*more: str) -> Launched:
        return servers.enter_context(launched(model, galleries, *words, *more))

    with ExitStack() as servers, ThreadPoolExecutor(3) as pool:
        three = drained, killed, kept = list(pool.map(lambda _: start(), range(3)))
        addresses = [each.address for each in three]
        with proxied(tmp_path, addresses) as proxy, load(proxy.address) as ends:
            for address in addresses:
                used(proxy, address)
            drained.process.send_signal(signal.SIGTERM)
            used(proxy, killed.address)
            retried = proxy.count("upstream_rq_retry")
            killed.process.kill()
            until(lambda: proxy.count("upstream_rq_retry") > retried)  # it had calls in flight
            until(lambda: not proxy.hosts()[killed.address].healthy)
            assert drained.process.wait(20) == 0
            used(proxy, kept.address)
            again = start("--port", killed.address.rpartition(":")[2])
            assert again.address == killed.address
            used(proxy, again.address)
    assert set(ends) == {"OK"}


class Counting(grpc.GenericRpcHandler):
    """Says that it is healthy, and UNAVAILABLE to everything else; counts what it is asked."""

    def __init__(self) -> None:
        self.asked = Counter[str]()

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        method = str(details.method)

        def answer(_: bytes, context: grpc.ServicerContext) -> bytes:
            if method != HEALTH:
                self.asked[method] += 1
                context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
            return HEALTHY

        return grpc.unary_unary_rpc_method_handler(answer)


@contextmanager
def counting() -> Iterator[tuple[str, Counter[str]]]:
    options = [("grpc.max_receive_message_length", -1)]
    server, handler = grpc.server(ThreadPoolExecutor(4), options=options), Counting()
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}", handler.asked
    finally:
        server.stop(None).wait()


@contextmanager
def hanging_up() -> Iterator[tuple[str, list[bytes]]]:
    """A server that takes what comes first on a connection and breaks it off; yields what it took."""
    taken: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    taken.append(connection.recv(1 << 16))

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}", taken
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def attempt(address: str, method: str, message: bytes = b"") -> grpc.StatusCode:
    """Make one call; return how it failed."""
    with connected(address) as stubs:
        call: Any = stubs.channel.unary_unary(method)
        with pytest.raises(grpc.RpcError) as failure:
            call(message, timeout=20)
    code: grpc.StatusCode = failure.value.code()
    return code


def test_what_reads_is_made_again_elsewhere_and_what_writes_never_if_it_may_have_been_done(
    tmp_path: Path,
) -> None:
    embed = "/crossbatch.v1.RetrievalService/Embed"
    calls = {name: role for name, role in ROLES.items() if name.startswith(OURS)}
    with (
        counting() as (reader, read),
        counting() as (other, others),
        proxied(tmp_path, [reader, other], writer=reader) as proxy,
    ):
        for method in calls:
            assert attempt(proxy.address, method) == grpc.StatusCode.UNAVAILABLE
        for method, role in calls.items():
            sent = read[method] + others[method]
            assert sent == (1 if role == "write" else 3), method
            assert bool(others[method]) == (role != "write"), method
        for size, sent in ((7 << 20, 6), (9 << 20, 7)):  # what is larger than 8 MiB is not kept
            attempt(proxy.address, embed, bytes(size))
            assert read[embed] + others[embed] == sent


def test_a_write_whose_connection_breaks_is_not_made_again(tmp_path: Path) -> None:
    with (
        counting() as (reader, _),
        hanging_up() as (writer, taken),
        proxied(tmp_path, [reader], writer=writer) as proxy,
    ):
        assert (
            attempt(proxy.address, "/crossbatch.v1.GalleryService/UpsertItems") == grpc.StatusCode.UNAVAILABLE
        )
        time.sleep(1)  # longer than all pauses between attempts
        assert len([each for each in taken if each]) == 1


def test_the_benchmark_in_short(model: Path, data: Path, tmp_path: Path) -> None:
    loads, parts = tmp_path / "loads.csv", tmp_path / "parts.csv"
    words = f"{model} {data} --servers 2 --loads 0.5 --seconds 0.4 --vectors 300 --work {tmp_path}"
    assert replicas.main([*words.split(), "--csv", str(loads), "--parts", str(parts)]) == 0
    (row,) = csv.DictReader(loads.read_text().splitlines())
    assert (row["servers"], row["failed"]) == ("2", "0")
    assert 0 < float(row["answered"]) < float(row["peak"])
    assert 0 < float(row["p50_ms"]) <= float(row["p99_ms"])
    assert all(float(row[f"{who}_cores"]) > 0 for who in ("servers", "client"))
    timed = {(each["part"], each["batch"]): each for each in csv.DictReader(parts.read_text().splitlines())}
    assert {"decode", "gallery", "handling", "proxy", "client", "waiting"} < {part for part, _ in timed}
    assert float(timed["encode", "8"]["mean_ms"]) > 0
    assert capacity(measured_parts(parts)) > 0
