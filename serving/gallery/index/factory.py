"""FAISS factory strings: which of them can be the type of a gallery's index."""

import re
from typing import Any

from serving.errors import InvalidArgument
from serving.gallery.index.index import exact_storage, load_faiss
from serving.gallery.index.kind import AUTOMATIC, EXACT

__all__ = ["check_recall", "check_type", "full_type"]

_MOST_LENGTH = 100
_MOST_NUMBER = 1 << 17
_MOST_LINKS = 512
_MOST_BITS = 12
_REASON = re.compile(r"Error: '.*' failed: (.+)", re.DOTALL)


def check_recall(wanted: float) -> None:
    """Check a wanted recall.

    Raises:
        InvalidArgument: It is not within 0 and 1.
    """
    if not 0.0 < wanted <= 1.0:  # NaN too
        raise InvalidArgument(f"the wanted recall is {wanted}; expected more than 0 and at most 1")


def check_type(wanted: str, *, dimension: int) -> str:
    """Return `wanted` if it can be the type of an index: "auto", "exact" or a FAISS factory string.

    Raises:
        InvalidArgument: It cannot; FAISS's reason is named.
    """
    if wanted not in (AUTOMATIC, EXACT):
        full_type(wanted, dimension=dimension)
    return wanted


def full_type(wanted: str, *, dimension: int) -> str:
    """Return the factory string that an index of a type is made by: with the exact vectors in it.

    Raises:
        InvalidArgument: FAISS makes no such index of this dimension, or it cannot be that of a gallery.
    """
    if wanted in (EXACT, "Flat"):
        return EXACT
    _refuse_dangerous(wanted, dimension)
    index = _made(wanted, wanted, dimension)
    if "IDMap" in wanted:
        raise _refusal(wanted, "the gallery adds IDMap itself; leave it out")
    if re.search("LSQ|RQ", wanted):
        raise _refusal(wanted, "additive quantisers train for hours; take PQ")
    if "NSG" in wanted:
        raise _refusal(wanted, "NSG cannot be added to; take HNSW")
    if exact_storage(index) is not None:
        return wanted
    full = f"{wanted},RFlat"
    _made(full, wanted, dimension)
    return full


def _made(text: str, wanted: str, dimension: int) -> Any:
    faiss = load_faiss()
    try:
        return faiss.index_factory(dimension, text, faiss.METRIC_INNER_PRODUCT)
    except (RuntimeError, MemoryError, TypeError, ValueError) as error:
        raise _refusal(wanted, _reason(str(error))) from error


def _reason(message: str) -> str:
    """Return what FAISS says, without its function and line."""
    found = _REASON.search(message)
    text = found[1] if found else message.rsplit(": ", 1)[-1]
    if "metric == METRIC_L2" in text or "METRIC_L2" in message:
        text = "it does not search by inner product"
    return " ".join(text.split()).rstrip(".")[:200]


def _refuse_dangerous(wanted: str, dimension: int) -> None:
    """Refuse what FAISS takes and then dies of, or does not end: a zero, or a size beyond reason."""
    if not wanted.isascii() or not wanted.isprintable() or not 0 < len(wanted) <= _MOST_LENGTH:
        raise _refusal(wanted, f"a factory string is 1 to {_MOST_LENGTH} printable ASCII characters")
    for number in map(int, re.findall(r"\d+", wanted)):
        if not 0 < number <= _MOST_NUMBER:
            raise _refusal(wanted, f"{number} in it is not within 1 to {_MOST_NUMBER}")
    for name, text in re.findall(r"(PCAW?R?|RR|ITQ|OPQ\d+_|HNSW|x)(\d+)", wanted):
        most = {"HNSW": _MOST_LINKS, "x": _MOST_BITS}.get(name, dimension)
        if int(text) > most:
            raise _refusal(wanted, f"{name}{text} in it goes beyond {most}")


def _refusal(wanted: str, reason: str) -> InvalidArgument:
    return InvalidArgument(
        f"{wanted[:_MOST_LENGTH]!r} cannot be the type of this gallery's index ({reason}); "
        "give auto, exact or another FAISS factory string"
    )
