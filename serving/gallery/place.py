"""The galleries of a place: of a folder, or of a Milvus server."""

from pathlib import Path
from typing import TypeAlias

from serving.gallery.directory import GalleryDirectory
from serving.gallery.gallery import Gallery, RebuildPolicy
from serving.gallery.milvus.directory import MilvusDirectory
from serving.gallery.milvus.gallery import MilvusGallery

__all__ = ["AnyGallery", "Galleries", "galleries_at"]

AnyGallery: TypeAlias = Gallery | MilvusGallery
Galleries: TypeAlias = GalleryDirectory | MilvusDirectory


def galleries_at(place: Path | str, *, policy: RebuildPolicy | None = None, device: str = "cpu") -> Galleries:
    """Open the galleries in a folder with `policy` and on `device`, or at an address of Milvus."""
    if isinstance(place, str):
        return MilvusDirectory(place)
    return GalleryDirectory(place, policy=policy, device=device)
