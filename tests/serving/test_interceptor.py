"""What a call passes on its way in and out, and the permits that it needs: counted, and always given back."""

import gc
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos import gallery_service_pb2 as gallery_pb
from protos import gallery_service_pb2_grpc, model_service_pb2_grpc
from protos import model_service_pb2 as model_pb
from serving.errors import Draining, NotFound, Overloaded
from serving.observability.access_log import MOST_LINES, AccessLog, AuditLog, told_peer
from serving.observability.call import Call
from serving.observability.metrics import Metrics
from serving.rpc.admission import Admission
from serving.rpc.auth import Authenticator
from serving.rpc.interceptor import CallInterceptor
from tests.serving.rpc_fakes import until
from tests.serving.stubs import Stubs, refusal_of

LIST = "/crossbatch.v1.ModelService/ListModels"


class Service(model_service_pb2_grpc.ModelServiceServicer, gallery_service_pb2_grpc.GalleryServiceServicer):
    """Does with each call what a test wants."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.work: Callable[[Call], Any] = lambda call: None

    def ListModels(self, request: Any, call: Call) -> Any:  # noqa: N802
        self.calls.append(call)
        self.work(call)
        return model_pb.ListModelsResponse()

    def BuildIndex(self, request: Any, call: Call) -> Iterator[Any]:  # noqa: N802
        self.calls.append(call)
        for i in range(1_000):
            self.work(call)
            yield gallery_pb.BuildIndexResponse(done=i)


class Running:
    """A server of these services."""

    def __init__(self) -> None:
        self.service, self.admission, self.metrics = Service(), Admission(256, 1 << 20), Metrics()
        self.interceptor = CallInterceptor(
            Authenticator(), self.admission, AccessLog(self.metrics, AuditLog())
        )
        self.server = grpc.server(ThreadPoolExecutor(16), interceptors=[self.interceptor])
        model_service_pb2_grpc.add_ModelServiceServicer_to_server(self.service, self.server)
        gallery_service_pb2_grpc.add_GalleryServiceServicer_to_server(self.service, self.server)
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()
        self.channel = grpc.insecure_channel(f"127.0.0.1:{self.port}")
        self.stubs = Stubs(self.channel)

    def list(self, **options: Any) -> Any:
        return self.stubs.models.ListModels(model_pb.ListModelsRequest(), **({"timeout": 10} | options))

    def build(self, **options: Any) -> Any:
        return self.stubs.galleries.BuildIndex(gallery_pb.BuildIndexRequest(name="g"), **options)


@pytest.fixture
def running() -> Iterator[Running]:
    running = Running()
    yield running
    running.channel.close()
    running.server.stop(0).wait()


def test_a_service_is_handed_the_call_and_the_caller_gets_his_id_back(running: Running) -> None:
    reply, call = running.stubs.models.ListModels.with_call(
        model_pb.ListModelsRequest(), timeout=10, metadata=(("x-request-id", "mine"),)
    )
    assert isinstance(reply, model_pb.ListModelsResponse)
    assert dict(call.trailing_metadata())["x-request-id"] == "mine"
    (seen,) = running.service.calls
    assert (seen.rpc, seen.method) == ("ModelService/ListModels", LIST)
    assert seen.request_id == "mine"
    assert told_peer(seen.peer).startswith("127.0.0.1:")
    assert seen.deadline is not None
    assert seen.deadline - time.monotonic() < 11
    assert running.interceptor.wait_idle(5)
    for useless in ("", "x" * 65):
        running.list(metadata=(("x-request-id", useless),))
        assert len(running.service.calls[-1].request_id) == 16


def test_a_stream_passes_whole_and_ends_when_its_caller_leaves(running: Running) -> None:
    assert [each.done for each in running.build(timeout=20)][-1] == 999
    running.service.work = lambda call: time.sleep(0.01)
    replies = running.build()
    next(replies)
    replies.cancel()
    assert running.interceptor.wait_idle(5)
    assert until(lambda: not running.service.calls[-1].news.empty())


def test_what_a_service_raises_becomes_its_status(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    def work(call: Call) -> None:
        raise errors.pop()

    running.service.work = work
    errors: list[Exception] = [ZeroDivisionError("secret"), NotFound("There is no such model.")]
    assert refusal_of(running.list, "NOT_FOUND") == "There is no such model."
    told = refusal_of(running.list, "INTERNAL")
    assert "secret" not in told
    assert "secret" in caplog.text
    errors = [Overloaded("Full.", retry_after=0.5)]
    refusal_of(lambda: list(running.build()), "RESOURCE_EXHAUSTED", reason="OVERLOADED")


def test_a_call_that_was_tried_before_is_told_to_wait_longer(running: Running) -> None:
    def work(call: Call) -> None:
        raise Overloaded("Full.", retry_after=0.01)

    running.service.work = work
    policy = {"maxAttempts": 3, "initialBackoff": "9s", "maxBackoff": "9s", "backoffMultiplier": 1}
    config = [{"name": [{}], "retryPolicy": policy | {"retryableStatusCodes": ["RESOURCE_EXHAUSTED"]}}]
    options = [("grpc.service_config", json.dumps({"methodConfig": config}))]
    channel = grpc.insecure_channel(f"127.0.0.1:{running.port}", options)
    with channel, pytest.raises(grpc.RpcError) as refused:
        Stubs(channel).models.ListModels(model_pb.ListModelsRequest(), timeout=5)
    trailing: Any = refused.value.trailing_metadata()
    assert 180 <= int(dict(trailing)["grpc-retry-pushback-ms"]) <= 360


def test_bytes_that_are_no_request_are_the_callers_fault(running: Running) -> None:
    raw: Any = running.channel.unary_unary(LIST)
    said = refusal_of(lambda: raw(b"\xff\xff"), "INVALID_ARGUMENT")
    assert "not a request of crossbatch.v1.ModelService/ListModels" in said
    refusal_of(lambda: raw(bytes(2 << 20)), "RESOURCE_EXHAUSTED", reason="OVERLOADED")  # too many
    assert running.admission.bytes == 0
    unknown: Any = running.channel.unary_unary("/crossbatch.v1.ModelService/Nothing")
    with pytest.raises(grpc.RpcError) as failure:
        unknown(b"")
    assert failure.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("leave", ["deadline", "cancel"])
def test_work_learns_that_nobody_waits_for_it(running: Running, leave: str) -> None:
    began, ended = threading.Event(), list[Exception]()

    def work(call: Call) -> None:
        began.set()
        deadline = time.monotonic() + 10
        try:
            while time.monotonic() < deadline:
                call.check()
                time.sleep(0.005)
        except Exception as error:
            ended.append(error)
            raise

    running.service.work = work
    future = running.stubs.models.ListModels.future(
        model_pb.ListModelsRequest(), timeout=0.3 if leave == "deadline" else 20
    )
    assert began.wait(10)
    if leave == "cancel":
        future.cancel()
    until(lambda: ended)
    expected = "DeadlineExceeded" if leave == "deadline" else "Cancelled"
    assert type(ended[0]).__name__ == expected


def test_no_call_outlives_its_end(running: Running) -> None:
    def fail(call: Call) -> None:
        raise NotFound("none")

    gc.collect()
    gc.disable()  # what points in a circle would wait for it, with its message
    try:
        running.list()
        running.service.work = fail
        refusal_of(running.list, "NOT_FOUND")
        running.service.calls.clear()
        running.admission.draining = True
        refusal_of(running.list, "UNAVAILABLE", reason="DRAINING")
        assert until(lambda: not any(type(each) is Call for each in gc.get_objects()))
    finally:
        gc.enable()


def test_a_server_that_drains_takes_no_call_and_gives_up_those_that_last(running: Running) -> None:
    def work(call: Call) -> None:
        until(lambda: not call.news.empty())
        call.check()

    running.service.work = work
    ask = running.stubs.models.ListModels.future
    future, *_ = [ask(model_pb.ListModelsRequest(), timeout=20) for _ in range(16)]
    until(lambda: len(running.service.calls) == 16)  # no thread is left, and a refusal needs none
    running.interceptor.drain()
    assert not running.interceptor.wait_idle(0.05)
    assert "try another one" in refusal_of(running.list, "UNAVAILABLE", reason="DRAINING")
    running.interceptor.give_up()
    assert running.interceptor.wait_idle(5)
    said = refusal_of(future.result, "UNAVAILABLE", reason="DRAINING")
    assert "stopped before the call was done" in said


def test_what_there_is_no_room_for_is_refused_before_its_message_is_received(running: Running) -> None:
    answered = threading.Event()
    never = iter(lambda: answered.wait(20) and b"", b"")
    # The server would have to wait for a message that never comes.
    silent: Any = running.channel.stream_unary("/crossbatch.v1.GalleryService/UpsertItems")
    running.admission.admit(Call("x"), 256)
    refusal_of(lambda: silent(never, timeout=5), "RESOURCE_EXHAUSTED", reason="OVERLOADED")
    answered.set()


def test_of_many_refusals_alike_few_have_a_line(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    running.interceptor.drain()
    with caplog.at_level(logging.INFO):
        for _ in range(3 * MOST_LINES):
            with pytest.raises(grpc.RpcError):
                running.list()
        time.sleep(1.1)
        with pytest.raises(grpc.RpcError):
            running.list()
    lines = [each for each in caplog.records if each.name.endswith("access_log")]
    assert len(lines) < 3 * MOST_LINES
    told = [each for each in lines if "more calls were refused" in each.getMessage()]
    assert sum(each.calls for each in told) + len(lines) - len(told) == 3 * MOST_LINES + 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("every", [False, True])
def test_of_many_calls_that_go_well_few_have_a_line_and_each_error_has(
    every: bool, caplog: pytest.LogCaptureFixture
) -> None:
    log = AccessLog(Metrics(), AuditLog(), every=every)
    with caplog.at_level(logging.INFO):
        for code in ("OK", "NOT_FOUND"):
            for _ in range(3 * MOST_LINES):
                log.ended(Call("RetrievalService/Search"), code)
    told = Counter(each.getMessage() for each in caplog.records)
    assert told["RetrievalService/Search NOT_FOUND"] == 3 * MOST_LINES
    answered = told["RetrievalService/Search OK"]
    # Where a second ends between, ten more are told.
    assert answered == 3 * MOST_LINES if every else MOST_LINES <= answered <= 2 * MOST_LINES


def test_an_address_is_written_as_people_write_it() -> None:
    assert told_peer("ipv6:%5Bfe80::7%25eth0%5D:50412") == "[fe80::7%eth0]:50412"
    assert told_peer("") == ""


Take: TypeAlias = Callable[[Admission, Call, int], None]


def call_of(client: str = "") -> Call:
    return Call("RetrievalService/Embed", client=client)


@pytest.mark.parametrize(("way", "take"), [("inputs", Admission.admit), ("bytes", Admission.receive)])
@given(limit=st.integers(1, 50), calls=st.lists(st.integers(1, 60), max_size=20))
def test_what_is_in_flight_keeps_the_limit_and_permits_come_back(
    way: str, take: Callable[[Admission, Call, int], None], limit: int, calls: list[int]
) -> None:
    admission = Admission(limit, limit)
    made = []
    for wanted in calls:
        made.append(call_of())
        held = getattr(admission, way)
        try:
            take(admission, made[-1], wanted)
        except Overloaded:
            assert held + wanted > limit
        else:
            assert getattr(admission, way) == held + wanted <= limit
    for each in made:  # those that were refused, too
        admission.release(each)
    assert (admission.inputs, admission.bytes) == (0, 0)


def test_a_draining_server_receives_nothing_and_lets_what_runs_go_on() -> None:
    admission, running = Admission(10), call_of()
    admission.receive(running, 1)
    admission.draining = True
    admission.admit(running)
    with pytest.raises(Draining):
        admission.receive(call_of(), 1)
    with pytest.raises(Draining):
        admission.check_room("", 0)


def test_a_batch_cannot_pass_by_the_limit_that_single_inputs_meet() -> None:
    """Of a client as of all: one call of ten is refused where ten calls of one are."""
    refusals: list[str] = []
    admission, shop = Admission(100, most_a_client=9, refused=refusals.append), call_of("shop")
    with pytest.raises(Overloaded, match="0 of at most 9 inputs of the key shop"):
        admission.admit(shop, 10)
    for _ in range(9):
        admission.admit(shop)
    with pytest.raises(Overloaded) as refusal:
        admission.check_room("shop")
    admission.check_room("another")
    assert 0.05 <= refusal.value.retry_after <= 5
    assert refusals == ["client_inputs"] * 2
    assert shop.inputs == 9


def test_a_client_at_its_limit_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.rpc.admission.MAX_MESSAGE_BYTES", 1)
    admission, greedy, modest = Admission(10, 10, most_a_client=6), call_of("greedy"), call_of("modest")
    admission.receive(greedy, 6)
    with pytest.raises(Overloaded, match=r"6 of at most 6 .* of the key greedy"):
        admission.receive(greedy, 1)
    admission.receive(modest, 4)
    with pytest.raises(Overloaded, match="10 of at most 10"):
        admission.receive(modest, 1)
    monkeypatch.undo()  # a client has room for one message of any size that is allowed
    Admission(1_000, 256 << 20, most_a_client=1).receive(call_of("shop"), 64 << 20)


def test_permits_survive_many_threads() -> None:
    admission = Admission(50)

    def work(_: int) -> int:
        made = call_of("a")
        try:
            admission.receive(made, 1)
            admission.admit(made, 7)
            assert admission.inputs <= 50
        except Overloaded:
            return 0
        finally:
            admission.release(made)
        return 1

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(work, range(2_000)))
    assert (admission.inputs, admission.bytes) == (0, 0)
