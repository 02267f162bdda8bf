"""Who is searched among whom: each image among all others, or the queries of a data set in its gallery."""

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Literal

import numpy as np
import numpy.typing as npt

from serving.catalog.catalog import Row, SplitRule
from serving.errors import BadData, BadSetting

__all__ = ["Ints", "ProtocolName", "groups_of", "roles_of", "sides_of"]

Ints = npt.NDArray[np.int64]
ProtocolName = Literal["auto", "leave-one-out", "query-gallery"]


def sides_of(roles: Sequence[str] | None, count: int) -> tuple[Ints, Ints | None]:
    """Give the rows that ask and those that are searched, None where each is searched among all others."""
    if roles is None or "query" not in roles:
        return np.arange(count), None
    role = np.array(roles)
    asked, held = np.flatnonzero(role == "query"), np.flatnonzero(role == "gallery")
    if len(held) == 0:
        raise BadData(
            f"{len(asked)} images are queries and none is of a gallery: name gallery images too, or no"
            " queries, so that every image is searched among all others"
        )
    return asked, held


def roles_of(
    rows: Sequence[Row], split: str, rule: SplitRule, *, protocol: ProtocolName = "auto"
) -> list[str] | None:
    """Give the roles of rows, one side of a data set that a rule cut, for `retrieval_metrics`.

    `auto` is as the data set has it, where its own test is measured; `query-gallery` is that wherever the
    rows come from, so that none that the data set calls train is searched; a `BadData` without either side.
    """
    if protocol == "leave-one-out" or (protocol == "auto" and (split != "test" or rule.by != "given")):
        return None
    roles = [row.split for row in rows]
    for side in ("query", "gallery") if protocol == "query-gallery" else ():
        if side not in roles:
            raise BadData(
                f"the protocol query-gallery needs queries and a gallery, but the data set calls none of the"
                f" {len(rows)} images of the split {split} {side}: name them so, or take the protocol"
                " leave-one-out"
            )
    return roles


def groups_of(rows: Sequence[Row], field: str | None) -> Ints | None:
    """Number images by what a field of their metadata says, (N,); one without it is a group by itself."""
    if field is None:
        return None
    known = {name for row in rows for name in row.metadata}
    if field not in known:
        there = f"there are {', '.join(sorted(known))}" if known else "they have no metadata"
        if near := get_close_matches(field, known, 1):
            there = f"did you mean {near[0]!r}?"
        raise BadSetting(f"none of the {len(rows)} images has the field {field!r}: {there}")
    numbers = dict[object, int]()
    values = [(row.metadata[field],) if field in row.metadata else row.key for row in rows]
    return np.array([numbers.setdefault(value, len(numbers)) for value in values], dtype=np.int64)
