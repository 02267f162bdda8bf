"""Where galleries are: in a folder, or on a Milvus server."""

from pathlib import Path
from typing import TypeAlias

from serving.gallery.directory import GalleryDirectory
from serving.gallery.gallery import Gallery, RebuildPolicy
from serving.gallery.milvus.directory import MilvusDirectory
from serving.gallery.milvus.gallery import MilvusGallery

__all__ = ["AnyGallery", "Galleries", "galleries_at", "is_server"]

AnyGallery: TypeAlias = Gallery | MilvusGallery
Galleries: TypeAlias = GalleryDirectory | MilvusDirectory


def is_server(place: str | Path) -> bool:
    """Tell whether a place is the address of a Milvus server; else it is a folder."""
    return str(place).startswith(("milvus:", "milvuss:"))


def galleries_at(place: str | Path, *, policy: RebuildPolicy | None = None, device: str = "cpu") -> Galleries:
    """Open the galleries at milvus://HOST:PORT, or in a folder with `policy` and on `device`."""
    if is_server(place):
        return MilvusDirectory(str(place))
    return GalleryDirectory(Path(place), policy=policy, device=device)
