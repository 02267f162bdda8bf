"""Calls of Embed: vectors in order, and each bad image alone."""

import grpc
import numpy as np
import pytest

from serving.model import preprocess
from serving.rpc.wire import vector_of
from tests.serving.rpc_fakes import DIMENSION, FakeEncoder, vector_for
from tests.serving.stubs import Stubs, fields_of, refused


def test_embed_answers_each_image_in_order_with_the_model_and_the_times(stubs: Stubs) -> None:
    images = [b"%d" % i for i in range(40)]
    reply = stubs.embed(*images)
    for data, result in zip(images, reply.results, strict=True):
        np.testing.assert_array_equal(vector_of(result.vector), vector_for(data))
    assert (reply.model_name, reply.model_fingerprint, reply.dimension) == ("fake", "a" * 64, DIMENSION)
    times = reply.timings
    assert 0 < times.decode_us <= times.total_us
    assert 0 < times.encode_us <= times.total_us


def test_vectors_travel_as_little_endian_float32(stubs: Stubs) -> None:
    (result,) = stubs.embed(b"x").results
    assert len(result.vector) == 4 * DIMENSION
    np.testing.assert_array_equal(np.frombuffer(result.vector, "<f4"), vector_for(b"x"))


def test_one_bad_image_fails_alone(stubs: Stubs, encoder: FakeEncoder) -> None:
    reply = stubs.embed(b"good", b"bad", b"", b"also good")
    assert [bool(each.vector) for each in reply.results] == [True, False, False, True]
    assert reply.results[1].error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert reply.results[1].error.message == "These bytes hold no image."
    assert "empty" in reply.results[2].error.message
    assert encoder.encoded == 2


def test_a_bug_in_one_image_fails_it_alone_and_tells_no_internals(stubs: Stubs) -> None:
    reply = stubs.embed(b"good", b"bug")
    assert reply.results[0].vector
    assert reply.results[1].error.code == grpc.StatusCode.INTERNAL.value[0]
    assert "secret" not in str(reply.results[1].error)


def test_when_every_input_is_bad_the_call_fails_with_the_first_and_names_all(stubs: Stubs) -> None:
    with pytest.raises(grpc.RpcError) as failure:
        stubs.embed(b"bad", b"")
    assert refused("INVALID_ARGUMENT", failure, "BAD_IMAGE") == "images[0]: These bytes hold no image."
    assert fields_of(failure) == ["images[0]", "images[1]"]


def test_a_failing_batch_fails_its_members_and_the_next_call_works(
    stubs: Stubs, encoder: FakeEncoder
) -> None:
    encoder.failing = RuntimeError("secret")
    with pytest.raises(grpc.RpcError) as failure:
        stubs.embed(b"1", b"2")
    assert "secret" not in refused("INTERNAL", failure, "INTERNAL")
    encoder.failing = None
    assert stubs.embed(b"1", b"2").results[1].vector


def test_a_photograph_larger_than_grpcs_own_limit_arrives_and_one_past_ours_is_refused(
    stubs: Stubs, encoder: FakeEncoder
) -> None:
    assert stubs.embed(bytes(6_000_000)).results[0].vector
    with pytest.raises(grpc.RpcError) as failure:
        stubs.embed(bytes(preprocess.MAX_BYTES + 1))
    assert f"{preprocess.MAX_BYTES:,}" in refused("INVALID_ARGUMENT", failure, "BAD_IMAGE")
    assert len(encoder.decoded) == 1  # the second was refused by its bytes alone
