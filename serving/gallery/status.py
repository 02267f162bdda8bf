"""What a gallery is and how it stands."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from serving.gallery.index.index import IndexMetadata, Trial
from serving.gallery.note import Note, read_note
from serving.gallery.search.snapshot import Snapshot
from serving.gallery.store.schema import FILE_NAME, FORMAT_VERSION
from serving.gallery.store.store import Store

__all__ = ["GalleryStatus", "status_of"]


@dataclass(frozen=True, slots=True)
class GalleryStatus:
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
    follows: Note | None = None  # what it is a copy of that a writer publishes
    lag_seconds: float | None = None  # for which that writer may have had a newer state


def status_of(path: Path, store: Store, snapshot: Snapshot) -> GalleryStatus:
    """Return how the gallery in a folder stands."""
    index, state, meta = snapshot.sealed.index, snapshot.state, store.meta
    facts = index.facts if index else IndexMetadata()
    previous, note = state.previous_name, read_note(path)
    if previous in ("", path.name) or not (path.with_name(previous) / FILE_NAME).is_file():
        previous = ""
    return GalleryStatus(
        name=path.name,
        path=str(path),
        model_name=meta.model_name,
        fingerprint=meta.fingerprint,
        dimension=meta.dimension,
        items=snapshot.count(None),
        fresh=int((~snapshot.growing.dead).sum()),
        deleted=int(snapshot.dead.sum()),
        index_type=facts.type,
        wanted_index=state.wanted_index,
        recall=facts.recall,
        wanted_recall=state.wanted_recall,
        latency_ms=facts.latency_ms,
        parameters=facts.parameters,
        trials=facts.trials,
        note=facts.note,
        index_items=len(index) if index else 0,
        index_bytes=index.bytes if index else 0,
        store_bytes=store.bytes,
        generation=state.generation,
        previous_name=previous,
        format_version=FORMAT_VERSION,
        created=meta.created,
        follows=note,
        lag_seconds=None if note is None else note.lag(),
    )
