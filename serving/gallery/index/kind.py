"""What kind of index a gallery has and what was measured of it; the FAISS file itself says neither."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["AUTOMATIC", "EXACT", "MEASURED_K", "Facts", "IndexDamaged", "Trial"]

AUTOMATIC = "auto"
EXACT = "exact"
MEASURED_K = 10
"""The recall of an index is that of the 10 nearest."""


class IndexDamaged(Exception):
    """The published index is missing, is not the one that was published, or cannot be made sense of."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What a candidate did on a sample of the gallery."""

    type: str
    recall: float
    latency_ms: float
    build_seconds: float


@dataclass(frozen=True, slots=True)
class Facts:
    """How an index was chosen, made and measured; the queries lie beside its own vectors.

    Attributes:
        type: "exact", or the FAISS factory string it was made by.
        wanted: The type that was asked for: "auto", "exact" or a factory string.
        wanted_recall: The recall that was asked for.
        recall: The share of the 10 nearest that it finds.
        queries: How many queries that was measured with; 0 where nothing was.
        latency_ms: Median milliseconds of one query on one thread.
        parameters: FAISS's search parameters that reach it: `nprobe`, `efSearch`, `k_factor_rf`.
        trials: What the candidates did that were tried.
        note: Why it is not of the type wanted; empty where it is.
        count: Its number of items when it was last built whole.
        build_seconds: How long that took.
        extended: How many items were added since.
        columns_checksum: The SHA-256 of the file of its labels and metadata.
    """

    type: str = EXACT
    wanted: str = AUTOMATIC
    wanted_recall: float = 0.99
    recall: float = 1.0
    queries: int = 0
    latency_ms: float = 0.0
    parameters: Mapping[str, float] = field(default_factory=dict)
    trials: tuple[Trial, ...] = ()
    note: str = ""
    count: int = 0
    build_seconds: float = 0.0
    extended: int = 0
    columns_checksum: str = ""

    @property
    def automatic(self) -> bool:
        """Whether the type was chosen by measurement."""
        return self.wanted == AUTOMATIC

    def to_json(self) -> str:
        """Return the JSON object that is stored beside the index's name."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "Facts":
        """Read what `to_json` wrote; an empty object stands for an index of which nothing is known.

        Raises:
            IndexDamaged: It is something else.
        """
        try:
            values: dict[str, Any] = json.loads(text)
            trials = tuple(Trial(**trial) for trial in values.pop("trials", ()))
            facts = cls(**values, trials=trials)
            kinds = {name: type(value) for name, value in asdict(cls()).items()}
            for name, value in asdict(facts).items():
                if not isinstance(value, (int, float) if kinds[name] is float else kinds[name]):
                    raise TypeError(f"{name} is of another kind")
        except (AttributeError, TypeError, ValueError, RecursionError) as error:
            raise IndexDamaged(f"the facts of the index cannot be read: {error}") from error
        return facts
