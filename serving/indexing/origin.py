"""Which data set an item is of, so that bringing a gallery in step with one never deletes items of another.

An origin is a short hash of where the data set lies, how it is laid out and which side of its split was
taken: a gallery's readers learn nothing of the machine that filled it. A side lies within another (`test`
within `all`): when the wider one is indexed, its items move to the wider one's origin, and those of a side
within that are gone from the data set are gone from the wider one, too.
"""

import hashlib
import os
from typing import Final, get_args

from serving.catalog.catalog import Catalog, Split

__all__ = ["covered", "kin", "origin_of"]

_WITHIN: Final[dict[str, tuple[str, ...]]] = {"all": get_args(Split), "test": ("test", "query", "gallery")}


def origin_of(catalog: Catalog, split: str) -> str:
    """Return the origin of items of that side of a data set: 16 hexadecimal digits."""
    place = os.fsencode(catalog.table or catalog.root)
    return hashlib.sha256(b"\0".join((place, catalog.format.encode(), split.encode()))).hexdigest()[:16]


def kin(catalog: Catalog) -> frozenset[str]:
    """Return the origins of all sides of a data set: an image is the same file on each of them."""
    return frozenset(origin_of(catalog, split) for split in get_args(Split))


def covered(catalog: Catalog, split: str) -> tuple[str, ...]:
    """Return the origins of the sides that lie within `split`, itself included."""
    return tuple(origin_of(catalog, side) for side in _WITHIN.get(split, (split,)))
