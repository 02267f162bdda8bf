"""Every stub of a server on one channel, messages for it, and what its errors must look like."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2_grpc
from grpc_status import rpc_status

from protos import gallery_service_pb2 as gallery_pb
from protos import (
    gallery_service_pb2_grpc,
    model_service_pb2_grpc,
    open_inference_pb2_grpc,
    retrieval_service_pb2_grpc,
)
from protos import retrieval_service_pb2 as retrieval_pb
from serving.rpc.wire import bytes_of
from tests.serving.rpc_fakes import vector_for


class Stubs:
    """Every stub on one channel."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.channel = channel
        self.retrieval = retrieval_service_pb2_grpc.RetrievalServiceStub(channel)
        self.galleries = gallery_service_pb2_grpc.GalleryServiceStub(channel)
        self.models = model_service_pb2_grpc.ModelServiceStub(channel)
        self.inference = open_inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        self.health = health_pb2_grpc.HealthStub(channel)

    def embed(self, *images: bytes, **options: Any) -> Any:
        return self.retrieval.Embed(retrieval_pb.EmbedRequest(images=images), **({"timeout": 10} | options))

    def embedding(self, *images: bytes) -> Any:
        return self.retrieval.Embed.future(retrieval_pb.EmbedRequest(images=images), timeout=20)

    def search(self, gallery: str, *queries: retrieval_pb.Query, **options: Any) -> Any:
        request = retrieval_pb.SearchRequest(gallery=gallery, queries=queries, **options)
        return self.retrieval.Search(request, timeout=10)

    def upsert(self, gallery: str, *items: gallery_pb.Item) -> Any:
        request = gallery_pb.UpsertItemsRequest(gallery=gallery, items=items)
        return self.galleries.UpsertItems(request, timeout=10)

    def create(self, name: str) -> gallery_pb.Gallery:
        request = gallery_pb.CreateGalleryRequest(name=name)
        gallery: gallery_pb.Gallery = self.galleries.CreateGallery(request, timeout=10).gallery
        return gallery


def item(key: str, **fields: Any) -> gallery_pb.Item:
    if "image" not in fields:
        fields.setdefault("vector", bytes_of(vector_for(key.encode())))
    return gallery_pb.Item(key=key, **fields)


def image(data: bytes) -> retrieval_pb.Query:
    return retrieval_pb.Query(image=data)


@contextmanager
def connected(address: str) -> Iterator[Stubs]:
    with grpc.insecure_channel(address) as channel:
        yield Stubs(channel)


def refused(code: str, failure: pytest.ExceptionInfo[Any], reason: str) -> str:
    """Check an error's shape, the same for all; return its message."""
    assert failure.value.code().name == code
    status = rpc_status.from_call(failure.value)
    infos = [each for each in status.details if each.Is(error_details_pb2.ErrorInfo.DESCRIPTOR)]
    assert len(infos) == 1
    info = error_details_pb2.ErrorInfo()
    infos[0].Unpack(info)
    assert (info.domain, info.reason) == ("crossbatch", reason)
    assert "Traceback" not in status.message
    return str(status.message)


def fields_of(failure: pytest.ExceptionInfo[Any]) -> list[str]:
    for each in rpc_status.from_call(failure.value).details:
        bad = error_details_pb2.BadRequest()
        if each.Unpack(bad):
            return [violation.field for violation in bad.field_violations]
    return []


def refusal_of(call: Callable[[], Any], code: str, *fields: str, reason: str = "") -> str:
    """Make a call that is refused, for these fields and this reason or the code's; return the message."""
    with pytest.raises(grpc.RpcError) as failure:
        call()
    if fields:
        assert fields_of(failure) == list(fields)
    return refused(code, failure, reason or code)
