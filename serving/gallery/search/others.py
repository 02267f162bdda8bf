"""What a search leaves out that is to find other things than the query shows."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.gallery.search.filter import LABEL, AllOf, Filter, In, Not
from serving.gallery.search.snapshot import Snapshot
from serving.gallery.store.transaction import Reader

__all__ = ["SAME_SCORE", "left_out", "others_than"]

SAME_SCORE = 0.9
"""Least score at which the best hit of a photo is taken to show the same thing."""


def left_out(
    snapshot: Snapshot, reader: Reader, query: NDArray[np.float32], key: str, field: str, above: float
) -> tuple[list[int], Filter]:
    """Tell the item that a query (1, d) shows, by its seq, and the filter that others than it fulfil.

    It is the item of the `key`, or, without one, the best of all that score at least `above`. Others have
    another value of the field; where it has none it is the only one of its kind. Of an unknown item there is
    no seq, and all are others.
    """
    near = [(seq, 1.0) for seq in reader.seqs([key]).values()] if key else snapshot.search(query, 1, above)[0]
    if not near:
        return [], AllOf(())
    rows = snapshot.rows.find({seq for seq, _ in near}, reader)
    seq, _ = min(near, key=lambda each: (-each[1], rows[each[0]][0]))
    _, label, _, metadata = rows[seq]
    return [seq], others_than(field, label, metadata)


def others_than(field: str, label: str, metadata: Mapping[str, Any]) -> Filter:
    """Return the filter that those fulfil which have another value of a field than an item has."""
    value: Any = label or None if field == LABEL else metadata.get(field)
    values = value if isinstance(value, list) else [value]
    return Not(In(field, tuple(each for each in values if isinstance(each, str | int | float))))
