"""What a gallery tells of itself."""

from dataclasses import dataclass

__all__ = ["GalleryInfo"]


@dataclass(frozen=True, slots=True)
class GalleryInfo:
    """What a gallery is and how it stands."""

    name: str
    path: str
    model_name: str
    fingerprint: str
    dimension: int
    items: int
    fresh: int  # live items newer than the index
    deleted: int  # vectors held though their items were deleted or replaced
    index_type: str
    index_items: int
    index_bytes: int
    store_bytes: int
    generation: int  # how often an index was published
    format_version: int
    created: str
