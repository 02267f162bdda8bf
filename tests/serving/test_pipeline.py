"""One model at work: decoding, batching, encoding and explaining, each image for itself."""

import asyncio
import time
import zlib
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import numpy as np
import pytest
from numpy.typing import NDArray

from serving.engine.explanation import Explanation
from serving.engine.pipeline import Bounds, Pipeline
from serving.engine.workers import Threads
from serving.errors import BadImage, DeadlineExceeded, InvalidArgument, Mismatch
from serving.observability.call import Stages
from serving.observability.metrics import Metrics
from tests.serving.rpc_fakes import FakeEncoder, FakeSpec, explanation_for, vector_for

T = TypeVar("T")


def run(
    encoder: Any,
    use: Callable[[Pipeline], Awaitable[T]],
    *,
    metrics: Metrics | None = None,
    **bounds: Any,
) -> T:
    """Use a pipeline in a loop of its own."""

    async def main() -> T:
        threads = Threads(2, most=600)
        limits = Bounds(**({"max_batch": 8, "max_wait": 0.002, "capacity": 600} | bounds))
        pipeline = Pipeline("m", encoder, threads, limits, metrics=metrics or Metrics(), failed=lambda: None)
        await pipeline.start()
        try:
            return await use(pipeline)
        finally:
            encoder.decode_gate.set()
            encoder.encode_gate.set()
            await pipeline.stop()
            await asyncio.to_thread(threads.close)

    return asyncio.run(asyncio.wait_for(main(), 15))


def test_pixels_are_embedded_as_their_file_is() -> None:
    encoder = FakeEncoder()
    pixels = np.stack([encoder.preprocess(each) for each in (b"one", b"two", b"three")])

    found = run(encoder, lambda pipeline: pipeline.encode(pixels, None, Stages()))

    np.testing.assert_array_equal(found, [vector_for(each) for each in (b"one", b"two", b"three")])
    assert encoder.batches == [3]


@pytest.mark.parametrize(
    ("shape", "kind"), [((1, 5, 4, 3), np.uint8), ((4, 4, 3), np.uint8), ((1, 4, 4, 3), int)]
)
def test_pixels_of_another_shape_or_type_are_refused(shape: tuple[int, ...], kind: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"takes images as uint8 \(B, 4, 4, 3\), and was given"):
        run(FakeEncoder(), lambda pipeline: pipeline.encode(np.zeros(shape, kind), None, Stages()))


def test_images_are_explained_each_for_itself() -> None:
    encoder = FakeEncoder(FakeSpec(prototypes=5))
    images = [b"a", b"bad", b"c", b"", b"e", b"f", b"g"]

    found = run(encoder, lambda pipeline: pipeline.explain(images, None, Stages()))

    assert [type(each) for each in found if isinstance(each, Exception)] == [BadImage, BadImage]
    for image, each in zip(images, found, strict=True):
        if isinstance(each, Explanation):
            histogram, assignments = explanation_for(zlib.crc32(image), 5)
            np.testing.assert_array_equal(each.histogram, histogram)
            np.testing.assert_array_equal(each.assignments, assignments)
    assert encoder.explained == 5


def test_waiting_to_be_explained_is_told_apart_from_the_run_of_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoder = FakeEncoder(FakeSpec(prototypes=5))
    run_model = encoder.run

    def slowly(*given: Any) -> Any:
        time.sleep(0.1)
        return run_model(*given)

    monkeypatch.setattr(encoder, "run", slowly)
    calls = [Stages() for _ in range(4)]

    async def use(pipeline: Pipeline) -> None:
        await asyncio.gather(*(pipeline.explain([b"a"], None, stages) for stages in calls))

    run(encoder, use)
    assert all(0.1 <= stages.encode < 0.3 for stages in calls)
    waited = sorted(stages.queue for stages in calls)
    assert all(wait >= 0.1 * turn for turn, wait in enumerate(waited))
    for stages in calls:
        assert stages.starts["encode"] == pytest.approx(stages.starts["queue"] + stages.queue)


def test_a_model_without_prototypes_explains_nothing_and_decodes_nothing() -> None:
    encoder = FakeEncoder()
    with pytest.raises(Mismatch, match="The model m has no prototypes"):
        run(encoder, lambda pipeline: pipeline.explain([b"a"], None, Stages()))
    assert encoder.decoded == []


def test_a_failure_to_explain_is_each_images_own(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = FakeEncoder(FakeSpec(prototypes=5))
    monkeypatch.setattr(encoder, "run", lambda *_: 1 / 0)
    found = run(encoder, lambda pipeline: pipeline.explain([b"a", b"bad", b"c"], None, Stages()))
    assert [type(each) for each in found] == [ZeroDivisionError, BadImage, ZeroDivisionError]


def test_expired_images_are_not_explained() -> None:
    encoder = FakeEncoder(FakeSpec(prototypes=5))
    found = run(encoder, lambda pipeline: pipeline.explain([b"a"] * 9, time.monotonic(), Stages()))
    assert [type(each) for each in found] == [DeadlineExceeded] * 9
    assert (encoder.decoded, encoder.explained) == ([], 0)


def test_images_that_expire_while_they_are_decoded_are_not_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = FakeEncoder(FakeSpec(prototypes=5))
    decode = encoder.preprocess

    def slow(data: bytes) -> Any:
        time.sleep(0.1)
        return decode(data)

    monkeypatch.setattr(encoder, "preprocess", slow)
    found = run(encoder, lambda pipeline: pipeline.explain([b"a"], time.monotonic() + 0.08, Stages()))
    assert [type(each) for each in found] == [DeadlineExceeded]
    assert encoder.explained == 0


def test_expired_requests_are_not_decoded() -> None:
    encoder = FakeEncoder()

    async def use(pipeline: Pipeline) -> None:
        assert [type(each) for each in await pipeline.embed([b"a"], time.monotonic(), Stages())] == [
            DeadlineExceeded
        ]
        encoder.decode_gate.clear()
        blocking = asyncio.create_task(pipeline.embed([b"1", b"2"], None, Stages()))
        await asyncio.sleep(0.02)
        late, _ = await asyncio.gather(
            pipeline.embed([b"late"] * 9, time.monotonic() + 0.02, Stages()),
            _later(0.06, encoder.decode_gate.set),
        )
        assert [type(each) for each in late] == [DeadlineExceeded] * 9
        await blocking

    run(encoder, use)
    assert sorted(encoder.decoded) == [b"1", b"2"]
    assert encoder.encoded == 2


@pytest.mark.parametrize("decoded", [True, False])
def test_expired_requests_are_not_inferred(decoded: bool) -> None:
    """They are in others: infinity#546, triton server#7532."""
    encoder = FakeEncoder()

    async def use(pipeline: Pipeline) -> None:
        encoder.encode_gate.clear()
        blocking = asyncio.create_task(pipeline.embed([b"first"], None, Stages()))
        await _until(lambda: encoder.encoding)
        deadline = time.monotonic() + 0.2
        if decoded:
            waiting = pipeline.encode(np.stack([encoder.preprocess(b"late")] * 3), deadline, Stages())
        else:
            waiting = pipeline.embed([b"late"] * 3, deadline, Stages())
        late = asyncio.create_task(waiting)
        await _until(lambda: len(pipeline.batcher) == 3)
        await asyncio.sleep(0.21)
        encoder.encode_gate.set()
        assert [type(each) for each in await late] == [DeadlineExceeded] * 3
        await blocking

    run(encoder, use)
    assert encoder.encoded == 1


def test_a_call_that_is_given_up_frees_its_places_and_is_not_inferred() -> None:
    encoder = FakeEncoder()

    async def use(pipeline: Pipeline) -> None:
        encoder.encode_gate.clear()
        blocking = asyncio.create_task(pipeline.embed([b"first"], None, Stages()))
        await _until(lambda: encoder.encoding)
        given_up = asyncio.create_task(pipeline.embed([b"x"] * 4, None, Stages()))
        await _until(lambda: len(pipeline.batcher) == 4)
        given_up.cancel()
        await asyncio.wait([given_up])
        others = asyncio.create_task(pipeline.embed([b"o"] * 4, None, Stages()))  # the queue has four places
        await _until(lambda: len(encoder.decoded) == 9)
        await asyncio.sleep(0.02)
        encoder.encode_gate.set()
        assert not any(isinstance(each, Exception) for each in await others)
        await blocking

    run(encoder, use, capacity=4)
    assert encoder.encoded == 5


@pytest.mark.parametrize("stage", ["decoding", "model"])
def test_a_call_with_256_images_does_not_make_one_with_a_single_image_wait_for_all(stage: str) -> None:
    encoder = FakeEncoder()
    gate = encoder.decode_gate if stage == "decoding" else encoder.encode_gate
    run_in_order: list[bytes] = []

    def encode(images: NDArray[np.uint8], encode: Any = encoder.encode) -> NDArray[np.float32]:
        checksums = [int.from_bytes(image.reshape(-1)[:4].tobytes(), "little") for image in images]
        run_in_order.extend(encoder.known[each] for each in checksums if each)
        vectors: NDArray[np.float32] = encode(images)
        return vectors

    encoder.encode = encode  # type: ignore[method-assign]

    async def use(pipeline: Pipeline) -> None:
        gate.clear()
        many = asyncio.create_task(pipeline.embed([b"%d" % i for i in range(256)], None, Stages()))
        if stage == "decoding":
            await asyncio.sleep(0.05)
        else:
            await _until(lambda: len(pipeline.batcher) + len(run_in_order) == 256)
        single = asyncio.create_task(pipeline.embed([b"single"], None, Stages()))
        if stage == "decoding":
            await asyncio.sleep(0.02)
        else:
            waiting = len(pipeline.batcher)
            await _until(lambda: len(pipeline.batcher) == waiting + 1)
        gate.set()
        await single
        assert not any(isinstance(each, Exception) for each in await many)

    run(encoder, use)
    assert run_in_order.index(b"single") < 100, "it came after most of the others"
    if stage == "decoding":
        assert encoder.decoded.index(b"single") < 20
    assert encoder.encoded == 257


def test_dynamic_batching_forms_batches() -> None:
    """It does not in triton server#5721: many single images that come together share runs of the model."""
    encoder = FakeEncoder()

    async def use(pipeline: Pipeline) -> None:
        calls = [pipeline.embed([b"%d" % i], None, Stages()) for i in range(64)]
        for outcomes in await asyncio.gather(*calls):
            assert not isinstance(outcomes[0], Exception)

    run(encoder, use, max_wait=1.0)
    assert encoder.batches == [8] * 8


def test_one_image_alone_does_not_wait_for_company() -> None:
    stages = Stages()
    run(FakeEncoder(), lambda pipeline: pipeline.embed([b"alone"], None, stages), max_wait=5.0)
    assert stages.queue < 1


def test_image_preparation_that_fails_hangs_no_later_request() -> None:
    """In infinity#367 a picture of one pixel ends the thread that prepares images, and all others hang."""
    encoder = FakeEncoder()

    async def use(pipeline: Pipeline) -> None:
        outcomes = await pipeline.embed([b"bug"] * 8 + [b"bad"] * 8, None, Stages())
        assert {type(each) for each in outcomes} == {ZeroDivisionError, BadImage}
        (after,) = await pipeline.embed([b"after"], None, Stages())
        assert not isinstance(after, Exception)

    run(encoder, use)


def test_each_run_of_the_model_is_measured() -> None:
    seen: list[tuple[str, int]] = []

    class Recording(Metrics):
        def batch(self, model: str, size: int, seconds: float) -> None:
            assert 0 <= seconds < 10
            seen.append((model, size))

    run(
        FakeEncoder(),
        lambda pipeline: pipeline.embed([b"%d" % i for i in range(16)], None, Stages()),
        metrics=Recording(),
        max_wait=1.0,
    )
    assert seen == [("m", 8)] * 2


async def _until(true: Callable[[], bool]) -> None:
    for _ in range(5000):
        if true():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it did not come true")


async def _later(seconds: float, act: Callable[[], None]) -> None:
    await asyncio.sleep(seconds)
    act()
