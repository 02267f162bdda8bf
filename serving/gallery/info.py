"""What a gallery tells of itself."""

from collections.abc import Mapping
from dataclasses import dataclass

from serving.gallery.index.metadata import Trial

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
    index_type: str  # "exact" or a FAISS factory string
    wanted_index: str  # "auto", "exact" or a FAISS factory string
    recall: float  # at 10, measured with queries beside the gallery's own vectors
    wanted_recall: float
    latency_ms: float  # median of one query on one thread; 0 where it was not measured
    parameters: Mapping[str, float]  # FAISS's, for the search
    trials: tuple[Trial, ...]  # what the types did that were tried
    note: str  # why the index is not of the type wanted; empty where it is
    index_items: int
    index_bytes: int
    store_bytes: int
    generation: int  # how often an index was published
    previous_name: str  # where the gallery lies whose name this one took by a switch; empty where none does
    format_version: int
    created: str
