"""The galleries of a place: of a folder, or of a Milvus server."""

from pathlib import Path
from typing import TypeAlias

from serving.errors import Unsupported
from serving.gallery.directory import GalleryDirectory
from serving.gallery.gallery import Gallery, RebuildPolicy
from serving.gallery.milvus.directory import MilvusDirectory
from serving.gallery.milvus.gallery import MilvusGallery
from serving.gallery.search.filter import LABEL

__all__ = ["AnyGallery", "Galleries", "galleries_at", "kinds_by_field"]

AnyGallery: TypeAlias = Gallery | MilvusGallery
Galleries: TypeAlias = GalleryDirectory | MilvusDirectory


def galleries_at(place: Path | str, *, policy: RebuildPolicy | None = None, device: str = "cpu") -> Galleries:
    """Open the galleries in a folder with `policy` and on `device`, or at an address of Milvus."""
    if isinstance(place, str):
        return MilvusDirectory(place)
    return GalleryDirectory(place, policy=policy, device=device)


def kinds_by_field(gallery: AnyGallery) -> dict[str, tuple[str, ...]]:
    """Return the kinds of what each field of the metadata holds; nothing of too many items on Milvus."""
    try:
        counts = gallery.fields()
    except Unsupported:
        return {}
    return {each.name: each.kinds for each in counts if each.name != LABEL}
