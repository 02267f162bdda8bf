"""The neighbours of queries, written as they travel: each item once, and never more than a reply may hold."""

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from protos import retrieval_service_pb2 as pb
from serving.errors import BadArtifact, InvalidArgument
from serving.rpc.limits import MAX_MESSAGE_BYTES
from serving.rpc.loose import loosened
from serving.rpc.pipeline import Outcome
from serving.rpc.status import refusal, to_status
from serving.rpc.wire import struct_of
from serving.rpc.workers import check_time

if TYPE_CHECKING:  # it brings an engine, which whoever imports only the settings does not need
    from serving.gallery.gallery import Gallery
    from serving.gallery.item import Hit

__all__ = ["search_results"]

HITS_AT_ONCE = 1_024
"""Most neighbours that are read from a gallery before their bytes are counted, but for those of one query."""

_SPARE_BYTES = 65_536  # for what stands beside the results in a reply
_FRAME_BYTES = 12  # at most, around each part
_UnreadResult = loosened(pb.SearchResult)
_SCORE_TAG = pb.Hit.DESCRIPTOR.fields_by_name["score"].number << 3 | 5  # 5: four bytes follow


def search_results(
    gallery: "Gallery",
    outcomes: Sequence[Outcome],
    deadline: float | None,
    *,
    k: int,
    minimum_score: float | None,
    exclude: tuple[str, ...],
) -> list[bytes]:
    """Search for each vector that there is; blocks.

    Args:
        gallery: Where to look.
        outcomes: Unit vectors (d,), or why there is none.
        deadline: The `time.monotonic()` until which somebody waits.
        k: Neighbours of each.
        minimum_score: Least score.
        exclude: Keys to leave out.

    Returns:
        A message of the type SearchResult for each outcome.

    Raises:
        Refusal: if they are more than a reply may hold.
        DeadlineExceeded: if there was no time for all of them.
        BadArtifact: if an item holds metadata that cannot be sent.
    """
    vectors = [each for each in outcomes if not isinstance(each, Exception)]
    room = MAX_MESSAGE_BYTES - _SPARE_BYTES
    written: dict[str, bytes] = {}
    found: list[bytes] = []
    step = max(1, HITS_AT_ONCE // k)
    for start in range(0, len(vectors), step):
        check_time(deadline, "all queries were answered")
        block = np.stack(vectors[start : start + step])
        for hits in gallery.search(block, k, minimum_score=minimum_score, exclude=exclude):
            parts: list[bytes] = []
            for hit in hits:
                if hit.key not in written:
                    check_time(deadline, "all neighbours were written")
                    written[hit.key] = _item_bytes(hit)
                part = written[hit.key] + struct.pack("<Bf", _SCORE_TAG, hit.score)
                room -= len(part) + _FRAME_BYTES
                if room < 0:
                    raise refusal(
                        "k",
                        f"The neighbours and their metadata are more than the {MAX_MESSAGE_BYTES:,} bytes of "
                        "a reply; ask for fewer neighbours or send fewer queries.",
                    )
                parts.append(part)
            found.append(_UnreadResult(hits=parts).SerializeToString())
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
    return pb.Hit(key=hit.key, label=hit.label, uri=hit.uri, metadata=metadata).SerializeToString()
