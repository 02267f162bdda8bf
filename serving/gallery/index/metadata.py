"""What is known of a gallery's index: its type and what was measured; the FAISS file itself says neither."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter

from serving.gallery.disk import file_checksum

__all__ = ["AUTOMATIC", "EXACT", "MEASURED_K", "IndexDamaged", "IndexMetadata", "Trial", "published"]

AUTOMATIC = "auto"
EXACT = "exact"
MEASURED_K = 10  # the recall of an index is that of the 10 nearest

_AS_WRITTEN = ConfigDict(extra="forbid", strict=True)


class IndexDamaged(Exception):
    """The published index is missing, is not the one that was published, or cannot be made sense of."""


@contextmanager
def published(path: Path, checksum: str) -> Iterator[None]:
    """Read a file that was published with this checksum; IndexDamaged where that cannot be done."""
    try:
        found = file_checksum(path)  # first of all: mapping a truncated file ends the process (SIGSEGV)
        if found != checksum:
            raise IndexDamaged(f"{path} has the checksum {found}, published was {checksum}")
        yield
    except (OSError, RuntimeError, AttributeError, TypeError, ValueError) as error:  # NUL: ValueError
        raise IndexDamaged(f"{path} cannot be read: {error}") from error


@dataclass(frozen=True, slots=True)
class Trial:
    """What a type did on a sample of the gallery."""

    __pydantic_config__ = _AS_WRITTEN
    type: str
    recall: float
    latency_ms: float
    build_seconds: float


@dataclass(frozen=True, slots=True)
class IndexMetadata:
    """How an index was chosen, built and measured."""

    __pydantic_config__ = _AS_WRITTEN
    type: str = EXACT  # or the FAISS factory string it was made by
    wanted: str = AUTOMATIC  # the type that was asked for: "auto", "exact" or a factory string
    wanted_recall: float = 0.99
    recall: float = 1.0  # the share of the 10 nearest that it finds
    queries: int = 0  # that the recall was measured with; 0 where nothing was
    latency_ms: float = 0.0  # median of one query on one thread
    parameters: Mapping[str, float] = field(default_factory=dict)  # nprobe, efSearch, k_factor_rf
    trials: tuple[Trial, ...] = ()
    note: str = ""  # why it is not of the type wanted; empty where it is
    count: int = 0  # of items when it was last built whole
    build_seconds: float = 0.0
    extended: int = 0  # items added since
    columns_checksum: str = ""  # of the file of its labels and metadata

    def to_json(self) -> str:
        """Return the JSON object that is stored beside the index's name."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "IndexMetadata":
        """Read what `to_json` wrote; an empty object stands for an index of which nothing is known."""
        try:
            return _STORED.validate_json(text)
        except ValueError as error:
            raise IndexDamaged(f"what is known of the index cannot be read: {error}") from error


_STORED = TypeAdapter(IndexMetadata)
