"""One model at work: decoding, batching, encoding and explaining, each image for itself."""

import asyncio
import time
import zlib
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import numpy as np
import pytest

from serving.errors import BadImage, DeadlineExceeded, InvalidArgument, Mismatch
from serving.rpc.server.metrics import Metrics
from serving.rpc.work.pipeline import Bounds, Explanation, Pipeline, Stages
from serving.rpc.work.workers import Threads
from tests.serving.rpc_fakes import FakeEncoder, FakeSpec, explanation_for, vector_for

T = TypeVar("T")


def run(encoder: Any, use: Callable[[Pipeline], Awaitable[T]], **bounds: Any) -> T:
    """Use a pipeline in a loop of its own."""

    async def main() -> T:
        threads = Threads(2, most=600)
        limits = Bounds(**({"max_batch": 8, "max_wait": 0.002, "capacity": 600} | bounds))
        pipeline = Pipeline("m", encoder, threads, limits, metrics=Metrics(), failed=lambda: None)
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


def test_a_model_without_prototypes_explains_nothing_and_decodes_nothing() -> None:
    encoder = FakeEncoder()
    with pytest.raises(Mismatch, match="The model m has no prototypes"):
        run(encoder, lambda pipeline: pipeline.explain([b"a"], None, Stages()))
    assert encoder.decoded == []


def test_expired_images_are_not_explained() -> None:
    encoder = FakeEncoder(FakeSpec(prototypes=5))
    found = run(encoder, lambda pipeline: pipeline.explain([b"a"] * 9, time.monotonic(), Stages()))
    assert [type(each) for each in found] == [DeadlineExceeded] * 9
    assert (encoder.decoded, encoder.explained) == ([], 0)
