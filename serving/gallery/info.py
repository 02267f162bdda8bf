"""What a gallery tells of itself, and which model may ask it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from serving.errors import ModelMismatch
from serving.gallery.index.metadata import Trial
from serving.gallery.store.schema import Meta

if TYPE_CHECKING:
    from serving.model.spec import ModelSpec

__all__ = ["GalleryInfo", "check_model"]


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


def check_model(gallery: str, meta: Meta, model: "ModelSpec") -> None:
    """Accept the model a gallery was made with, and a file of lower precision made from it."""
    theirs = (model.fingerprint, model.fp32_fingerprint)
    if meta.fingerprint in theirs and meta.dimension == model.dimension:
        return
    ours = f"{meta.model_name} (fingerprint {meta.fingerprint[:12]}, dimension {meta.dimension})"
    given = f"{model.name} (fingerprint {model.fingerprint[:12]}, dimension {model.dimension})"
    raise ModelMismatch(
        f"the gallery {gallery} holds embeddings of the model {ours}, and the model given is {given}; "
        "give the gallery's own model, or index the images into a new gallery"
    )
