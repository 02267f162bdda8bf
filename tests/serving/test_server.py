"""The server as a whole: health, reflection, request ids, settings and limits."""

import logging
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from protos import open_inference_pb2
from protos import retrieval_service_pb2 as retrieval_pb
from serving.gallery import item as gallery_item
from serving.gallery import validation
from serving.model import preprocess
from serving.rpc import limits
from serving.server import server
from serving.server.server import Server
from serving.settings import Settings
from tests.serving.rpc_fakes import FakeEncoder
from tests.serving.stubs import Stubs, refused


def test_when_no_image_can_be_embedded_any_more_health_says_so(
    stubs: Stubs,
    running: Server,
    encoder: FakeEncoder,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def die(*_: object, **__: object) -> None:
        raise SystemExit

    watch = stubs.health.Watch(health_pb2.HealthCheckRequest())
    assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
    monkeypatch.setattr(encoder, "encode", die)
    with pytest.raises(grpc.RpcError) as failure:
        stubs.embed(b"1")
    refused("UNAVAILABLE", failure, "UNAVAILABLE")
    assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert running.failed.is_set()
    assert not stubs.inference.ServerReady(open_inference_pb2.ServerReadyRequest()).ready
    for service in ("", *server.SERVICES):
        reply = stubs.health.Check(health_pb2.HealthCheckRequest(service=service))
        assert reply.status == health_pb2.HealthCheckResponse.NOT_SERVING
    with pytest.raises(grpc.RpcError):
        stubs.embed(b"2")
    assert any(record.levelname == "CRITICAL" and record.exc_info for record in caplog.records)


def test_the_request_id_comes_back_and_is_in_the_log(stubs: Stubs, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="serving.observability.access_log"):
        request = retrieval_pb.EmbedRequest(images=[b"x"])
        _, call = stubs.retrieval.Embed.with_call(request, metadata=(("x-request-id", "my-id"),))
        assert ("x-request-id", "my-id") in call.trailing_metadata()
        with pytest.raises(grpc.RpcError) as failure:
            stubs.embed(b"bad")
        metadata: Any = failure.value.trailing_metadata()
        made = dict(metadata)["x-request-id"]
        assert len(made) == 16
    records = [record for record in caplog.records if hasattr(record, "rpc")]
    assert [(each.rpc, each.code) for each in records] == [  # type: ignore[attr-defined]
        ("RetrievalService/Embed", "OK"),
        ("RetrievalService/Embed", "INVALID_ARGUMENT"),
    ]


def test_health_and_reflection(stubs: Stubs) -> None:
    for name in (
        "",
        "crossbatch.v1.RetrievalService",
        "crossbatch.v1.GalleryService",
        "crossbatch.v1.ModelService",
    ):
        reply = stubs.health.Check(health_pb2.HealthCheckRequest(service=name))
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
    reflect = reflection_pb2_grpc.ServerReflectionStub(stubs.channel).ServerReflectionInfo
    ask = reflection_pb2.ServerReflectionRequest
    (listed,) = reflect(iter([ask(list_services="")]))
    names = {each.name for each in listed.list_services_response.service}
    assert {*server.SERVICES, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"} == names
    (found,) = reflect(iter([ask(file_containing_symbol="crossbatch.v1.RetrievalService")]))
    file = descriptor_pb2.FileDescriptorProto.FromString(
        found.file_descriptor_response.file_descriptor_proto[0]
    )
    assert file.package == "crossbatch.v1"


def test_settings_hold_their_bounds() -> None:
    for wrong in (
        {"port": 70_000},
        {"max_batch": -1},
        {"grace": -1},
        {"max_wait_ms": -1},
        {"nope": 1},
        {"max_in_flight": limits.MAX_INPUTS - 1},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Settings.model_validate({"model": ["m"], "galleries": "g"} | wrong)


def test_the_limits_are_those_of_the_parts_behind() -> None:
    assert limits.MAX_K == gallery_item.MAX_K
    assert limits.MAX_BYTES_IN_FLIGHT >= limits.MAX_MESSAGE_BYTES
    assert limits.MAX_HITS >= limits.MAX_K
    assert limits.MAX_MESSAGE_BYTES > preprocess.MAX_BYTES + validation.MAX_METADATA_BYTES
