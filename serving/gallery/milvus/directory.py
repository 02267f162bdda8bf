"""The galleries of a Milvus server: a collection each, and an alias of it for the gallery's name."""

import secrets
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Self, TypeVar, Unpack

from serving.errors import AlreadyExists, InvalidArgument, Mismatch, NotFound, Unavailable, Unsupported
from serving.gallery.directory import check_name, no_gallery
from serving.gallery.milvus.gallery import MilvusGallery
from serving.gallery.milvus.meta import (
    COLLECTION,
    alias_of,
    meta_of,
    name_of,
    previous_of,
    properties_of,
    with_previous,
)
from serving.gallery.milvus.server import Collection, Gone, Server
from serving.gallery.store.schema import MadeFor, Meta, check_made_for

__all__ = ["MilvusDirectory"]

T = TypeVar("T")
_TRIES = 3


class MilvusDirectory:
    """The galleries of a Milvus server; every method may be called from several threads at once.

    It offers what `GalleryDirectory` does, whose methods tell more. A switch and a rollback move two aliases,
    one after the other; what breaks off in between is finished by the same call, made again.
    """

    def __init__(self, address: str, *, timeout: float = 10.0) -> None:
        """Connect to a server at milvus://HOST:PORT[/DATABASE], or milvuss:// for TLS; Unavailable.

        Each call of Milvus ends within about `timeout` seconds. BadSetting tells that it is no address, or
        that pymilvus is not installed.
        """
        self._server = Server(address, timeout=timeout)
        self.path = self._server.address
        self._guard = threading.Lock()
        self._open: dict[str, MilvusGallery] = {}
        self._closed = False

    def names(self) -> list[str]:
        """Return the names of the galleries there, sorted."""
        return sorted(name for alias in self._server.aliases() if (name := name_of(alias)))

    def open_names(self) -> list[str]:
        """Return the names of the galleries that were asked for."""
        with self._guard:
            return list(self._open)

    def get(self, name: str) -> MilvusGallery:
        """Return the gallery of that name."""
        if self._closed:
            raise Unavailable(f"the galleries at {self.path} have been closed; open them again")
        try:
            found = self._found(name)
            meta = meta_of(found, name)
        except NotFound:
            with self._guard:
                self._open.pop(name, None)
            raise
        with self._guard:
            gallery = self._open.get(name)
            if gallery is None or gallery.collection != found.name:
                gallery = self._open[name] = MilvusGallery(self._server, name, found.name, meta)
            return gallery

    def create(self, name: str, **made_for: Unpack[MadeFor]) -> MilvusGallery:
        """Make a new, empty gallery; AlreadyExists, and Unsupported with thumbnails or an index of a type."""
        check_name(name)
        check_made_for(made_for)
        if made_for.get("thumbnail_side"):
            raise Unsupported("a gallery on Milvus keeps no thumbnails; leave them out")
        if made_for.get("index", "auto") != "auto" or "recall" in made_for:
            raise Unsupported("Milvus builds an index of its own; leave out the index and the recall wanted")
        taken = AlreadyExists(
            f"there is already a gallery called {name}; choose another name, or drop it first"
        )
        if self._find(name):
            raise taken
        meta = Meta(
            id=secrets.token_hex(16),
            model_name=made_for["model_name"],
            fingerprint=made_for["fingerprint"],
            dimension=made_for["dimension"],
            thumbnail_side=0,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        collection = COLLECTION + meta.id
        self._server.create(collection, meta.dimension, properties_of(meta))
        try:
            self._server.point(alias_of(name), collection)
        except Exception as error:
            self._server.drop(collection)
            if self._find(name):  # another was faster
                raise taken from error
            raise
        return self.get(name)

    def using(self, name: str, work: Callable[[MilvusGallery], T]) -> T:
        """Return what `work` does with a gallery, begun anew where it was dropped or switched meanwhile."""
        for _ in range(_TRIES - 1):
            try:
                return work(self.get(name))
            except Gone:
                continue
        return work(self.get(name))

    def switch(self, name: str, other: str, *, timeout: float = 60.0) -> None:
        """Let the gallery `other` have the name `name`, at once; one that had it gets the name `other`."""
        check_name(name)
        coming, current = self._found(other), self._find(name)
        if name == other:
            raise InvalidArgument(f"the gallery {name} has that name already; give that of another")
        meta_of(coming, other)
        if current is None:
            self._server.note(coming.name, with_previous("", ""))
            self._server.point(alias_of(name), coming.name)
            self._server.unpoint(alias_of(other))
            return
        meta_of(current, name)
        if previous_of(current.properties) == (other, coming.name):
            raise AlreadyExists(
                f"the gallery {name} has been switched with {other} already; "
                f"to undo that, use rollback {name}"
            )
        if coming.name == current.name:  # the same call broke off before its last step
            self._finish(name, other, coming)
            return
        self._server.note(coming.name, with_previous(other, current.name))
        self._server.repoint(alias_of(name), coming.name)
        self._server.repoint(alias_of(other), current.name)

    def rollback(self, name: str, *, timeout: float = 60.0) -> str:
        """Undo the switch by which the gallery got its name; returns the name that it has now."""
        current = self._found(name)
        other, collection = previous_of(current.properties)
        if other in ("", name):
            raise NotFound(f"the gallery {name} did not get its name by a switch; there is nothing to undo")
        before = self._find(other)
        if before is None:
            raise NotFound(f"the gallery that was {name} before was called {other}, and is gone")
        if before.name not in (collection, current.name):  # of which the latter is a rollback that broke off
            raise Mismatch(
                f"the gallery {other} is not the one that was {name} before; to serve it all the same, "
                f"use switch {name} {other}"
            )
        self._server.repoint(alias_of(other), current.name)
        self._server.repoint(alias_of(name), collection)
        return other

    def drop(self, name: str) -> None:
        """Remove a gallery; its name is free at once."""
        found = self._found(name)
        meta_of(found, name)  # or it is somebody's who would miss it
        self._server.unpoint(alias_of(name))
        if not any(name_of(alias) for alias in self._server.aliases(found.name)):  # a switch was broken off
            self._server.drop(found.name)
        with self._guard:
            self._open.pop(name, None)

    def close(self) -> None:
        """Close the connection."""
        if not self._closed:
            self._closed = True
            self._server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _find(self, name: str) -> Collection | None:
        try:
            return self._server.describe(alias_of(name))
        except Gone:
            return None

    def _found(self, name: str) -> Collection:
        found = self._find(check_name(name))
        if found is None:
            raise no_gallery(name, f"at {self.path}", self.names())
        return found

    def _finish(self, name: str, other: str, coming: Collection) -> None:
        before, collection = previous_of(coming.properties)
        if before != other or not collection:
            raise InvalidArgument(f"the names {name} and {other} are of the same gallery; drop one of them")
        self._server.repoint(alias_of(other), collection)
