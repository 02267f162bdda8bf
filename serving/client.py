"""The Python client: images and arrays in, arrays and records out; needs the base installation only."""

import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, overload

import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc
from numpy.typing import ArrayLike, NDArray

from protos import gallery_service_pb2 as gallery_pb
from protos import gallery_service_pb2_grpc, model_service_pb2_grpc, retrieval_service_pb2_grpc
from protos import model_service_pb2 as model_pb
from protos import retrieval_service_pb2 as retrieval_pb
from serving.errors import CrossbatchError, InvalidArgument
from serving.rpc.answers import (
    GalleryInfo,
    Hit,
    Item,
    ModelInfo,
    gallery_info_of,
    hits_of,
    item_message,
    model_info_of,
)
from serving.rpc.caller import Caller, faults_of
from serving.rpc.given import (
    ImageLike,
    check_k,
    check_score,
    excluded,
    floats_of,
    image_bytes,
    many,
    text,
    texts,
)
from serving.rpc.limits import DEFAULT_K, DEFAULT_PORT, MAX_DELETED_KEYS, MAX_HITS, MAX_INPUTS
from serving.rpc.splitting import answered_each, chunks_of, moved_field
from serving.rpc.status import from_status
from serving.rpc.wire import bytes_of, vector_of

__all__ = ["Client", "GalleryInfo", "Hit", "Item", "ModelInfo"]

T = TypeVar("T")
R = TypeVar("R")


class Client:
    """A connection to one server; may be used from several threads.

    Every call has `timeout` seconds, retries included. A call that is refused for want of room, or that finds
    no server, is made again up to `retries` times while time is left; as many as by default last more than 4
    seconds, so that a server's restart is ridden out. Inputs beyond the limits of one call
    are sent in several, one after the other; each of them has the whole `timeout`.
    """

    def __init__(
        self, address: str = f"127.0.0.1:{DEFAULT_PORT}", *, timeout: float = 10.0, retries: int = 12
    ) -> None:
        """Keep the address; the first call connects.

        Raises:
            InvalidArgument: if an argument makes no sense.
        """
        self._caller = Caller(address, timeout=timeout, retries=retries)
        channel = self._caller.channel
        self._retrieval = retrieval_service_pb2_grpc.RetrievalServiceStub(channel)
        self._galleries = gallery_service_pb2_grpc.GalleryServiceStub(channel)
        self._models = model_service_pb2_grpc.ModelServiceStub(channel)
        self._health = health_pb2_grpc.HealthStub(channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Hang up."""
        self._caller.close()

    def ready(self, *, wait: float = 0.0) -> bool:
        """Ask whether the server serves.

        Args:
            wait: Seconds to go on asking for.

        Returns:
            True as soon as it does; False when it does not, or is not there.
        """
        deadline = time.monotonic() + wait
        while True:
            try:
                reply = self._health.Check(health_pb2.HealthCheckRequest(), timeout=max(1.0, min(wait, 5.0)))
                serving = reply.status == health_pb2.HealthCheckResponse.SERVING
            except Exception:  # whatever it is, it is not an answer
                serving = False
            if serving or time.monotonic() >= deadline:
                return bool(serving)
            time.sleep(0.05)

    @overload
    def embed(
        self, images: Iterable[ImageLike], *, on_error: Literal["raise"] = "raise"
    ) -> NDArray[np.float32]: ...
    @overload
    def embed(
        self, images: Iterable[ImageLike], *, on_error: Literal["return"]
    ) -> list[NDArray[np.float32] | CrossbatchError]: ...
    def embed(
        self, images: Iterable[ImageLike], *, on_error: Literal["raise", "return"] = "raise"
    ) -> NDArray[np.float32] | list[NDArray[np.float32] | CrossbatchError]:
        """Embed images.

        Args:
            images: Encoded bytes, or paths (`Path` or `str`) that are read as they are needed.
            on_error: "raise" the first bad image's error, or "return" each error in its image's place.

        Returns:
            float32 (N, d), unit rows; with "return" a list of N rows float32 (d,) or errors.

        Raises:
            BadImage: if an image is bad; says which.
            InvalidArgument: if an argument is of another kind.
            CrossbatchError: if the call as a whole fails.
        """
        _check_on_error(on_error)
        rows = self._each(_read(images), len, MAX_INPUTS, self._embed, raising=on_error == "raise")
        if on_error == "return":
            return rows
        return np.stack(rows) if rows else np.zeros((0, self.model().dimension), np.float32)

    @overload
    def search(
        self,
        gallery: str,
        *,
        images: Iterable[ImageLike] | None = None,
        vectors: ArrayLike | None = None,
        keys: Iterable[str] | None = None,
        k: int = DEFAULT_K,
        minimum_score: float | None = None,
        exclude: Iterable[str] = (),
        on_error: Literal["raise"] = "raise",
    ) -> list[list[Hit]]: ...
    @overload
    def search(
        self,
        gallery: str,
        *,
        images: Iterable[ImageLike] | None = None,
        vectors: ArrayLike | None = None,
        keys: Iterable[str] | None = None,
        k: int = DEFAULT_K,
        minimum_score: float | None = None,
        exclude: Iterable[str] = (),
        on_error: Literal["return"],
    ) -> list[list[Hit] | CrossbatchError]: ...
    def search(
        self,
        gallery: str,
        *,
        images: Iterable[ImageLike] | None = None,
        vectors: ArrayLike | None = None,
        keys: Iterable[str] | None = None,
        k: int = DEFAULT_K,
        minimum_score: float | None = None,
        exclude: Iterable[str] = (),
        on_error: Literal["raise", "return"] = "raise",
    ) -> list[list[Hit]] | list[list[Hit] | CrossbatchError]:
        """Find the nearest items to each query; give exactly one of `images`, `vectors` and `keys`.

        Args:
            gallery: Where to look.
            images: Encoded bytes, or paths (`Path` or `str`) that are read as they are needed.
            vectors: float32 (Q, d), unit rows.
            keys: Items of the gallery; each finds itself unless it is excluded.
            k: Neighbours of each query, 1 to 2,048.
            minimum_score: Leaves out items with a lower score, -1 to 1.
            exclude: Keys of items to leave out, at most 1,000.
            on_error: "raise" the first bad query's error, or "return" each error in its query's place.

        Returns:
            One list of hits a query, nearest first.

        Raises:
            InvalidArgument: if a query or an option is bad.
            NotFound: if there is no such gallery or key.
            ModelMismatch: if the gallery belongs to another model.
            CrossbatchError: if the call as a whole fails.
        """
        if sum(each is not None for each in (images, vectors, keys)) != 1:
            raise InvalidArgument("Give exactly one of images, vectors and keys to search for.")

        _check_on_error(on_error)
        name, k, minimum, exclude = (
            text(gallery, "gallery"),
            check_k(k),
            check_score(minimum_score),
            excluded(exclude),
        )

        def search_once(queries: list[retrieval_pb.Query]) -> list[list[Hit] | CrossbatchError]:
            request = retrieval_pb.SearchRequest(
                gallery=name, queries=queries, k=k, minimum_score=minimum, exclude_keys=exclude
            )
            results = self._caller.call(self._retrieval.Search, request).results
            return [from_status(each.error) if each.HasField("error") else hits_of(each) for each in results]

        at_once = min(MAX_INPUTS, MAX_HITS // k)
        queries = _queries(images, vectors, keys)
        return self._each(queries, _size_of, at_once, search_once, raising=on_error == "raise")

    def upsert(self, gallery: str, items: Iterable[Item]) -> int:
        """Store items, replacing those with the same keys.

        Items are sent in calls of at most 256; each call stores all of its items or none, and what an earlier
        call has stored stays.

        Returns:
            How many were stored; all of them are on disk.

        Raises:
            InvalidArgument: if an item is bad; says which.
            NotFound: if there is no such gallery.
            ModelMismatch: if the gallery belongs to another model.
            CrossbatchError: if a call fails for another reason.
        """
        name, stored = text(gallery, "gallery"), 0
        messages = (item_message(item) for item in many(items, "items"))
        for chunk in chunks_of(messages, _size_of, MAX_INPUTS):
            request = gallery_pb.UpsertItemsRequest(gallery=name, items=chunk)
            try:
                stored += self._caller.call(self._galleries.UpsertItems, request).stored
            except CrossbatchError as error:
                faults = faults_of(error)
                if not faults:
                    raise
                raise type(error)(f"{moved_field(faults[0].field, stored)}: {faults[0].error}") from error
        return stored

    def delete(self, gallery: str, keys: Iterable[str]) -> int:
        """Remove items.

        Keys are sent in calls of at most 1,000. A call whose reply was lost is made again, and then finds its
        items gone: they are removed, and not in the count.

        Returns:
            How many were there and are gone; too few after a lost reply.

        Raises:
            InvalidArgument: if the keys are no list of strings, or one cannot be a key.
            NotFound: if there is no such gallery.
            CrossbatchError: if a call fails for another reason.
        """
        name = text(gallery, "gallery")
        requests = (
            gallery_pb.DeleteItemsRequest(gallery=name, keys=chunk)
            for chunk in chunks_of(texts(keys, "keys"), len, MAX_DELETED_KEYS)
        )
        return sum(self._caller.call(self._galleries.DeleteItems, each).deleted for each in requests)

    def create(self, gallery: str) -> GalleryInfo:
        """Make an empty gallery for the model that is served.

        Raises:
            AlreadyExists: if the name is taken.
            InvalidArgument: if the name breaks the rule.
            CrossbatchError: if the call fails for another reason.
        """
        request = gallery_pb.CreateGalleryRequest(name=text(gallery, "gallery"))
        # Made again after a lost reply, it would find its own gallery and say that the name is taken.
        reply = self._caller.call(self._galleries.CreateGallery, request, idempotent=False)
        return gallery_info_of(reply.gallery)

    def gallery(self, name: str) -> GalleryInfo:
        """Describe one gallery.

        Raises:
            NotFound: if there is none of that name; names those that there are.
            CrossbatchError: if the call fails for another reason.
        """
        request = gallery_pb.GetGalleryRequest(name=text(name, "name"))
        return gallery_info_of(self._caller.call(self._galleries.GetGallery, request).gallery)

    def galleries(self) -> list[GalleryInfo]:
        """Describe all galleries, in the order of their names.

        Raises:
            CrossbatchError: if a call fails.
        """
        found: list[GalleryInfo] = []
        token = ""
        while True:
            request = gallery_pb.ListGalleriesRequest(page_token=token)
            reply = self._caller.call(self._galleries.ListGalleries, request)
            found += [gallery_info_of(each) for each in reply.galleries]
            token = reply.next_page_token
            if not token:
                return found

    def model(self) -> ModelInfo:
        """Describe the model that is served.

        Raises:
            CrossbatchError: if the call fails.
        """
        return model_info_of(self._caller.call(self._models.GetModel, model_pb.GetModelRequest()).model)

    def _embed(self, images: list[bytes]) -> list[NDArray[np.float32] | CrossbatchError]:
        results = self._caller.call(self._retrieval.Embed, retrieval_pb.EmbedRequest(images=images)).results
        return [
            from_status(each.error) if each.HasField("error") else vector_of(each.vector) for each in results
        ]

    def _each(
        self,
        inputs: Iterator[T],
        size: Callable[[T], int],
        at_once: int,
        call: Callable[[list[T]], list[R | CrossbatchError]],
        *,
        raising: bool,
    ) -> list[Any]:
        """Answer each input for itself, in as many calls as the limits demand."""
        answers: list[R | CrossbatchError] = []
        for chunk in chunks_of(inputs, size, at_once):
            for answer in answered_each(chunk, call):
                if raising and isinstance(answer, CrossbatchError):
                    raise type(answer)(f"input {len(answers)}: {answer}") from answer
                answers.append(answer)
        return answers


def _read(images: Iterable[ImageLike]) -> Iterator[bytes]:
    return (image_bytes(image) for image in many(images, "images"))


def _queries(
    images: Iterable[ImageLike] | None, vectors: ArrayLike | None, keys: Iterable[str] | None
) -> Iterator[retrieval_pb.Query]:
    if images is not None:
        return (retrieval_pb.Query(image=image) for image in _read(images))
    if vectors is not None:
        rows = floats_of(vectors, "vectors", "(queries, components)")
        return (retrieval_pb.Query(vector=bytes_of(row)) for row in rows)
    return (retrieval_pb.Query(key=key) for key in texts(() if keys is None else keys, "keys"))


def _check_on_error(choice: str) -> None:
    if choice not in ("raise", "return"):
        raise InvalidArgument(f"on_error cannot be {choice!r}; it must be 'raise' or 'return'.")


def _size_of(message: Any) -> int:
    return int(message.ByteSize())
