"""A model at work: each image one outcome, its own; bounded, in turns, and never computed for nobody."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from serving.engine.instances import InstanceLimits, ModelInstances
from serving.errors import BadImage, Cancelled, DeadlineExceeded, Draining, Mismatch, Overloaded, Unavailable
from serving.observability.call import Call, gone
from tests.serving.rpc_fakes import FakeEncoder, FakeSpec, until, vector_for


@dataclass
class Noting(FakeEncoder):
    """Notes the images of each batch; fails on one that holds a poisonous image."""

    ran: list[list[bytes]] = field(default_factory=list)
    threads_used: list[int] = field(default_factory=list)
    poison: frozenset[bytes] = frozenset()

    def encode(self, images: NDArray[np.uint8], *, threads: int = 0) -> NDArray[np.float32]:
        if images.any():
            checksums = [int.from_bytes(image.reshape(-1)[:4].tobytes(), "little") for image in images]
            batch = [self.known[each] for each in checksums]
            self.ran.append(batch)
            self.threads_used.append(threads)
            if self.poison & set(batch):
                raise BadImage(f"a batch of {len(batch)}")
        return super().encode(images, threads=threads)


def call_of(seconds: float | None = None) -> Call:
    return Call("Test/Call", deadline=None if seconds is None else time.monotonic() + seconds)


@contextmanager
def running(encoder: Any, **changes: Any) -> Iterator[ModelInstances]:
    """A model that is started, and stopped in the end with its gates open."""
    hooks = {name: changes.pop(name) for name in ("ran", "failed") if name in changes}
    limits = InstanceLimits(**({"instances": 2, "max_batch": 8, "capacity": 600} | changes))
    instances = ModelInstances("m", encoder, limits, **hooks)
    instances.start()
    try:
        yield instances
    finally:
        encoder.decode_gate.set()
        encoder.encode_gate.set()
        instances.stop()


@contextmanager
def callers() -> Iterator[Callable[..., "Future[Any]"]]:
    with ThreadPoolExecutor(80) as pool:
        yield pool.submit


def kinds(outcomes: Sequence[Any]) -> list[type]:
    return [type(each) for each in outcomes]


@settings(max_examples=40, deadline=None)
@given(
    calls=st.lists(
        st.tuples(
            st.lists(st.sampled_from([b"good", b"fine", b"bad", b"bug", b"poison"]), max_size=6),
            st.sampled_from(["wait", "wait", "cancelled", "expired"]),
        ),
        max_size=12,
    ),
    instances=st.integers(1, 3),
    max_batch=st.integers(1, 5),
    max_wait=st.sampled_from([0.0, 0.002]),
)
def test_each_image_has_exactly_one_outcome_its_own(
    calls: list[tuple[list[bytes], str]], instances: int, max_batch: int, max_wait: float
) -> None:
    named = [
        ([b"%s %d.%d" % (kind, n, i) for i, kind in enumerate(each)], fate)
        for n, (each, fate) in enumerate(calls)
    ]
    poison = frozenset(image for images, _ in named for image in images if image.startswith(b"poison"))
    encoder = Noting(poison=poison)
    limits = {"instances": instances, "max_batch": max_batch, "max_wait": max_wait}
    with running(encoder, **limits) as model, callers() as begin:
        asked = []
        for images, fate in named:
            call = call_of(-1 if fate == "expired" else 20)
            if fate == "cancelled":
                call.news.put(gone)
            asked.append(begin(model.embed, images, call))
        for (images, fate), future in zip(named, asked, strict=True):
            if fate != "wait":
                with pytest.raises(Cancelled if fate == "cancelled" else DeadlineExceeded):
                    future.result(10)
                continue
            outcomes = future.result(10)
            assert len(outcomes) == len(images)
            for image, outcome in zip(images, outcomes, strict=True):
                batch = next((batch for batch in encoder.ran if image in batch), [])
                if image.startswith((b"bad", b"bug")):
                    assert type(outcome) is (BadImage if image.startswith(b"bad") else ZeroDivisionError)
                elif poison & set(batch):
                    assert str(outcome) == f"a batch of {len(batch)}"
                else:
                    np.testing.assert_array_equal(outcome, vector_for(image))
    assert model.waiting == 0
    assert all(len(batch) <= max_batch for batch in encoder.ran)
    ran = [image for batch in encoder.ran for image in batch]
    wanted = [each for images, fate in named if fate == "wait" for each in images]
    assert sorted(ran) == sorted(each for each in wanted if not each.startswith((b"bad", b"bug")))


def test_what_waits_is_shared_among_the_instances_that_are_free() -> None:
    encoder = Noting()
    encoder.encode_gate.clear()
    with running(encoder, instances=2, max_batch=4) as model, callers() as begin:
        first = [begin(model.embed, [b"%d" % i], call_of()) for i in range(2)]
        until(lambda: len(encoder.ran) == 2)
        rest = begin(model.embed, [b"x%d" % i for i in range(10)], call_of())
        until(lambda: model.waiting == 10)
        encoder.encode_gate.set()
        assert len(rest.result(10)) == 10
        assert all(len(each.result(10)) == 1 for each in first)
    assert max(len(batch) for batch in encoder.ran) == 4
    assert encoder.threads_used[1:] == [1] * (len(encoder.ran) - 1)


def test_an_image_that_is_alone_has_all_cores_and_waits_for_nobody() -> None:
    encoder = Noting()
    with running(encoder, max_wait=5.0, max_batch=1) as model:
        call = call_of()
        model.embed([b"alone"], call)
        assert encoder.threads_used == [0]
        assert call.stages.seconds("queue") < 1
        model.embed([b"a", b"b"], call_of())
    assert encoder.threads_used[1:] != [0, 0]
    gpu = Noting(on_gpu=True)
    with running(gpu, instances=3) as model:
        model.embed([b"%d" % i for i in range(9)], call_of())
    assert set(gpu.threads_used) == {0}  # which takes whole batches of each instance


def test_an_image_may_wait_a_little_for_others_to_join_it() -> None:
    """Batches do not form in triton server#5721: single images that come together share runs of the model."""
    encoder = Noting()
    with running(encoder, instances=1, max_wait=5.0) as model, callers() as begin:
        calls = [begin(model.embed, [b"%d" % i], call_of()) for i in range(64)]
        assert all(len(each.result(10)) == 1 for each in calls)
    assert [len(batch) for batch in encoder.ran] == [8] * 8


def test_a_call_with_256_images_does_not_make_one_with_a_single_image_wait_for_all() -> None:
    encoder = Noting()
    encoder.encode_gate.clear()
    with running(encoder) as model, callers() as begin:
        many = begin(model.embed, [b"%d" % i for i in range(256)], call_of())
        until(lambda: encoder.encoding)
        single = begin(model.embed, [b"single"], call_of())
        until(lambda: model.waiting > 240)
        encoder.encode_gate.set()
        single.result(10)
        many.result(10)
    ran = [image for batch in encoder.ran for image in batch]
    assert ran.index(b"single") < 40
    assert len(ran) == 257


@pytest.mark.parametrize("way", ["expired", "cancelled"])
@pytest.mark.parametrize("decoded", [True, False])
def test_what_nobody_waits_for_gives_up_its_places_and_is_not_computed(way: str, decoded: bool) -> None:
    """It is in others: infinity#546, triton server#7532, #6920, #7512."""
    encoder = FakeEncoder()
    encoder.encode_gate.clear()
    with running(encoder, instances=1, capacity=4) as model, callers() as begin:
        blocking = begin(model.embed, [b"first"], call_of())
        until(lambda: encoder.encoding)
        call = call_of(0.2 if way == "expired" else None)
        late = begin(model.embed, [encoder.preprocess(b"late") if decoded else b"late"] * 4, call)
        until(lambda: model.waiting == 4)
        with pytest.raises(Overloaded, match="4 images wait, and 4 is the most"):
            model.embed([b"no place"], call_of())
        if way == "cancelled":
            call.news.put(gone)
        with pytest.raises(DeadlineExceeded if way == "expired" else Cancelled):
            late.result(10)
        others = begin(model.embed, [b"o"] * 4, call_of())
        until(lambda: model.waiting == 4)
        encoder.encode_gate.set()
        assert kinds(others.result(10)) == [np.ndarray] * 4
        blocking.result(10)
    assert encoder.encoded == 5
    assert encoder.decoded == [b"first", *[b"late"] * decoded, *[b"o"] * 4]


def test_what_expires_while_it_is_decoded_reaches_no_model() -> None:
    encoder = FakeEncoder()
    encoder.decode_gate.clear()
    with running(encoder) as model, callers() as begin:
        late = begin(model.embed, [b"late"], call_of(0.1))
        with pytest.raises(DeadlineExceeded):
            late.result(10)
        encoder.decode_gate.set()
    assert (encoder.decoded, encoder.encoded) == ([b"late"], 0)


def test_a_call_that_would_come_too_late_behind_others_is_refused_at_once() -> None:
    encoder = FakeEncoder()
    encode = encoder.encode

    def slow(images: NDArray[np.uint8], *, threads: int = 0) -> NDArray[np.float32]:
        time.sleep(0.02 * len(images))
        return encode(images)

    encoder.encode = slow  # type: ignore[method-assign]
    with running(encoder, instances=1, max_batch=2) as model, callers() as begin:
        model.embed([b"%d" % i for i in range(6)], call_of())  # some 20 ms an image
        encoder.encode_gate.clear()
        waiting = [begin(model.embed, [b"%d" % i], call_of(20)) for i in range(40)]
        until(lambda: model.waiting >= 38)
        with pytest.raises(Overloaded, match=r"3\d images wait, for about .* and the call has 0.20 s"):
            model.embed([b"late"], call_of(0.2))
        enough = begin(model.embed, [b"enough"], call_of(20))
        until(lambda: model.waiting >= 39)
        encoder.encode_gate.set()
        assert all(kinds(each.result(10)) == [np.ndarray] for each in (*waiting, enough))
        encoder.encode = encode  # type: ignore[method-assign]
        assert kinds(model.embed([b"alone"], call_of(0.03))) == [np.ndarray]  # nobody is before it


def test_what_cannot_be_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(FakeEncoder()) as model, pytest.raises(Mismatch, match="The model m has no prototypes"):
        model.explain([b"a"], call_of())
    encoder = FakeEncoder(FakeSpec(prototypes=5))
    with running(encoder) as model:
        with pytest.raises(DeadlineExceeded):
            model.explain([b"a"] * 9, call_of(-1))
        assert (encoder.decoded, encoder.explained) == ([], 0)
        monkeypatch.setattr(encoder, "run", lambda *_: 1 / 0)
        bug = ZeroDivisionError
        assert kinds(model.explain([b"a", b"bad", b"c"], call_of())) == [bug, BadImage, bug]


def test_a_model_that_stops_finishes_what_waits_and_takes_no_more() -> None:
    encoder = FakeEncoder()
    encoder.encode_gate.clear()
    with running(encoder) as model, callers() as begin:
        waiting = begin(model.embed, [b"%d" % i for i in range(20)], call_of())
        until(lambda: encoder.encoding)
        stopping = begin(model.stop)
        time.sleep(0.02)
        with pytest.raises(Draining):
            model.embed([b"more"], call_of())
        encoder.encode_gate.set()
        assert kinds(waiting.result(10)) == [np.ndarray] * 20
        stopping.result(10)
    assert not [each for each in threading.enumerate() if each.name.startswith("m-")]


def test_when_an_instance_dies_nobody_hangs(caplog: pytest.LogCaptureFixture) -> None:
    """They do in infinity#367, where the thread that prepares images ends and /health is green."""
    failures: list[bool] = []

    def broken(*_: object) -> None:
        raise SystemExit  # whatever it is

    with running(FakeEncoder(), instances=1, ran=broken, failed=lambda: failures.append(True)) as model:
        outcomes = model.embed([b"%d" % i for i in range(20)], call_of())
        assert kinds(outcomes) == [np.ndarray] * 8 + [Unavailable] * 12
        with pytest.raises(Unavailable, match="can embed no image any more"):
            model.embed([b"later"], call_of())
    assert failures == [True]
    assert [each.levelname for each in caplog.records if each.exc_info] == ["CRITICAL"]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="only Linux has a niceness a thread")
def test_instances_leave_the_cores_to_those_who_answer() -> None:
    nice: list[int] = []
    encoder = FakeEncoder()
    decode = encoder.preprocess

    def noted(data: bytes) -> NDArray[np.uint8]:
        nice.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return decode(data)

    encoder.preprocess = noted  # type: ignore[method-assign]
    with running(encoder) as model:
        model.embed([b"x"], call_of())
    assert nice == [min(19, 10 + os.getpriority(os.PRIO_PROCESS, os.getpid()))]
