"""The galleries of a Milvus server."""

from collections.abc import Callable
from typing import Self, TypeVar, Unpack

from serving.gallery.milvus.gallery import MilvusGallery
from serving.gallery.store.schema import MadeFor

__all__ = ["MilvusDirectory"]

T = TypeVar("T")


class MilvusDirectory:
    """The galleries of a Milvus server; every method may be called from several threads at once.

    It offers what `GalleryDirectory` does, whose methods tell more.
    """

    path: str  # milvus://HOST:PORT, for a person to read

    def __init__(self, address: str, *, timeout: float = 10.0) -> None:
        """Connect to a server at milvus://HOST:PORT[/DATABASE], or milvuss:// for TLS."""
        raise NotImplementedError

    def names(self) -> list[str]:
        """Return the names of the galleries there, sorted."""
        raise NotImplementedError

    def open_names(self) -> list[str]:
        """Return the names of the galleries that were asked for."""
        raise NotImplementedError

    def get(self, name: str) -> MilvusGallery:
        """Return the gallery of that name."""
        raise NotImplementedError

    def create(self, name: str, **made_for: Unpack[MadeFor]) -> MilvusGallery:
        """Make a new, empty gallery."""
        raise NotImplementedError

    def using(self, name: str, work: Callable[[MilvusGallery], T]) -> T:
        """Return what `work` does with a gallery, begun anew where it was dropped or switched meanwhile."""
        raise NotImplementedError

    def switch(self, name: str, other: str, *, timeout: float = 60.0) -> None:
        """Let the gallery `other` have the name `name`, at once; one that had it gets the name `other`."""
        raise NotImplementedError

    def rollback(self, name: str, *, timeout: float = 60.0) -> str:
        """Undo the switch by which the gallery got its name; returns the name that it has now."""
        raise NotImplementedError

    def drop(self, name: str) -> None:
        """Remove a gallery; its name is free at once."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the connection."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
