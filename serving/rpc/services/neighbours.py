"""The neighbours of queries, written as they travel: each item once, and never more than a reply may hold."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from protos import retrieval_service_pb2 as pb
from serving.engine.pipeline import Outcome
from serving.engine.workers import check_time
from serving.errors import BadArtifact, InvalidArgument
from serving.gallery.search.filter import Filter
from serving.rpc.limits import DEFAULT_K, MAX_MESSAGE_BYTES
from serving.rpc.pieces import Pieces, framed
from serving.rpc.status import Refusal, Violation, refusal, to_status
from serving.rpc.wire import struct_of

if TYPE_CHECKING:  # it brings an engine, which whoever imports only the settings does not need
    from serving.gallery.gallery import Gallery
    from serving.gallery.item import Hit

__all__ = ["Options", "search_results"]

HITS_AT_ONCE = 1_024
"""Most neighbours that are read from a gallery before their bytes are counted, but for those of one query."""

_FEW = 32  # neighbours, whose metadata seldom takes longer to write than a hand-over to a thread
_SPARE_BYTES = 3 * 65_536  # for what stands beside the results in a reply: 64 KiB of unknown fields at most
_FRAME_BYTES = 12  # at most, around each part
_SCORE_TAG = pb.Hit.DESCRIPTOR.fields_by_name["score"].number << 3 | 5  # 5: four bytes follow


@dataclass(frozen=True, slots=True)
class Options:
    """What a search finds for each of its queries."""

    k: int = DEFAULT_K
    """Neighbours, at most."""
    minimum_score: float | None = None
    """Least score of a neighbour."""
    exclude: Sequence[str] = ()
    """Keys to leave out."""
    filter: Filter | None = None
    """What every neighbour must fulfil."""
    group_by_label: bool = False
    """Whether only the nearest item of each label is one."""

    @property
    def are_plain(self) -> bool:
        """Whether they ask for a few nearest items and nothing else."""
        return self.k <= _FEW and not self.exclude and self.filter is None and not self.group_by_label


def search_results(
    gallery: "Gallery",
    outcomes: Sequence[Outcome],
    options: Options,
    deadline: float | None,
    *,
    at_once: bool = False,
) -> list[bytes]:
    """Search for each vector that there is; blocks.

    Args:
        gallery: Where to look.
        outcomes: Unit vectors (d,), or why there is none.
        options: What to find for each.
        deadline: The `time.monotonic()` until which somebody waits.
        at_once: Whether to search only what needs nothing first.

    Returns:
        A message of the type SearchResult for each outcome.

    Raises:
        Refusal: if they are more than a reply may hold, or the filter cannot be applied to this gallery.
        DeadlineExceeded: if there was no time for all of them.
        BadArtifact: if an item holds metadata that cannot be sent.
        NotAtHand: if something had to be done first, though it was to be `at_once`.
    """
    vectors = [each for each in outcomes if not isinstance(each, Exception)]
    room = MAX_MESSAGE_BYTES - _SPARE_BYTES
    written: dict[int, bytes] = {}  # by version: a key may get another item between two blocks
    found: list[bytes] = []
    step = max(1, HITS_AT_ONCE // options.k)
    for start in range(0, len(vectors), step):
        check_time(deadline, "all queries were answered")
        block = np.stack(vectors[start : start + step])
        try:
            near = gallery.search(
                block,
                options.k,
                minimum_score=options.minimum_score,
                exclude=options.exclude,
                filter=options.filter,
                group_by_label=options.group_by_label,
                at_once=at_once,
            )
        except InvalidArgument as error:
            if options.filter is None:
                raise
            raise Refusal([Violation("filter", error)]) from error  # all else was checked before
        for hits in near:
            parts: list[bytes] = []
            for hit in hits:
                if hit.version not in written:
                    check_time(deadline, "all neighbours were written")
                    written[hit.version] = _item_bytes(hit)
                part = written[hit.version] + struct.pack("<Bf", _SCORE_TAG, hit.score)
                room -= len(part) + _FRAME_BYTES
                if room < 0:
                    raise refusal(
                        "k",
                        f"The neighbours and their metadata are more than the {MAX_MESSAGE_BYTES:,} bytes of "
                        "a reply; ask for fewer neighbours or send fewer queries.",
                    )
                parts.append(part)
            found.append(Pieces(framed(pb.SearchResult, "hits", parts)).join())
    answers = iter(found)
    return [
        pb.SearchResult(error=to_status(outcome)).SerializeToString()
        if isinstance(outcome, Exception)
        else next(answers)
        for outcome in outcomes
    ]


def _item_bytes(hit: "Hit") -> bytes:
    """What a Hit tells of its item, the score left out."""
    try:
        metadata = struct_of(hit.metadata) if hit.metadata else None
    except InvalidArgument as error:
        raise BadArtifact(f"The item {hit.key!r} of the gallery cannot be sent: {error}") from error
    item = pb.Hit(key=hit.key, label=hit.label, uri=hit.uri, metadata=metadata, version=hit.version)
    return item.SerializeToString()
