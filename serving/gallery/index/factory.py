"""FAISS factory strings: which of them can be the type of a gallery's index.

FAISS takes strings whose indexes end the process later, in training, adding or searching, or that train
without end. Those of the common families are known to be sound; any other is first tried in a process of its
own (`trial`).
"""

import re
from functools import lru_cache
from typing import Any

from serving.errors import InvalidArgument
from serving.gallery.index.index import exact_storage, load_faiss
from serving.gallery.index.kind import AUTOMATIC, EXACT
from serving.gallery.index.trial import TrialFailed, full_type_by_trial, reason_of

__all__ = ["check_recall", "check_type", "full_type"]

_MOST_LENGTH = 100
_MOST_NUMBER = 1 << 17
_MOST_LINKS = 512
_LEAST_LINKS = 2
_MOST_BITS = 12
_MOST_CENTROIDS = 1 << 14
_TRANSFORM = r"(?:PCAR?\d+|OPQ\d+(?:_\d+)?)"
_LISTS = r"IVF\d+(?:_HNSW\d+)?"
_REFINE = r"(?:,RFlat|,Refine\((?:Flat|SQ[468]|SQfp16|SQbf16)\))"
_CODES = r"(?:Flat|SQ[468]|SQfp16|SQbf16|PQ\d+(?:x4fs|x[4-8])?)"
_GRAPH = r"HNSW\d+(?:,(?:Flat|SQ[468]|SQfp16|SQbf16))?"
_KNOWN = re.compile(rf"(?:{_TRANSFORM},)?(?:{_GRAPH}|(?:{_LISTS},)?{_CODES}){_REFINE}?(?:,RFlat)?")
"""What needs no trial: it is what the automatic choice and the tests build."""


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


@lru_cache(maxsize=256)
def full_type(wanted: str, *, dimension: int) -> str:
    """Return the factory string that an index of a type is made by: with the exact vectors in it.

    Raises:
        InvalidArgument: FAISS makes no such index of this dimension, or it cannot be that of a gallery.
    """
    if wanted in (EXACT, "Flat"):
        return EXACT
    _refuse_dangerous(wanted, dimension)
    if not _KNOWN.fullmatch(wanted):
        try:
            return full_type_by_trial(wanted, dimension)
        except TrialFailed as error:
            raise _refusal(wanted, str(error)) from error
    index = _made(wanted, wanted, dimension)
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
        raise _refusal(wanted, reason_of(str(error))) from error


def _refuse_dangerous(wanted: str, dimension: int) -> None:
    """Refuse what FAISS takes and then dies of, or does not end: a zero, or a size beyond reason."""
    if not wanted.isascii() or not wanted.isprintable() or not 0 < len(wanted) <= _MOST_LENGTH:
        raise _refusal(wanted, f"a factory string is 1 to {_MOST_LENGTH} printable ASCII characters")
    for number in map(int, re.findall(r"\d+", wanted)):
        if not 0 < number <= _MOST_NUMBER:
            raise _refusal(wanted, f"{number} in it is not within 1 to {_MOST_NUMBER}")
    for name, text in re.findall(r"(PCAW?R?|RR|ITQ|OPQ\d+_|Pad|HNSW|x)(\d+)", wanted):
        most = {"HNSW": _MOST_LINKS, "x": _MOST_BITS, "Pad": 2 * dimension}.get(name, dimension)
        if int(text) > most:
            raise _refusal(wanted, f"{name}{text} in it goes beyond {most}")
        if name == "HNSW" and int(text) < _LEAST_LINKS:
            raise _refusal(wanted, f"a graph has at least {_LEAST_LINKS} links")
    if "IDMap" in wanted:
        raise _refusal(wanted, "the gallery adds IDMap itself; leave it out")
    if "NSG" in wanted:
        raise _refusal(wanted, "NSG cannot be added to; take HNSW")
    for stages, bits in re.findall(r"RQ(\d+)x(\d+)", wanted):
        if int(stages) << int(bits) > _MOST_CENTROIDS:
            raise _refusal(wanted, f"RQ{stages}x{bits} in it has more than {_MOST_CENTROIDS} centroids")
    if "LSQ" in wanted:
        raise _refusal(wanted, "its training takes hours and cannot be stopped; take PQ")


def _refusal(wanted: str, reason: str) -> InvalidArgument:
    return InvalidArgument(
        f"{wanted[:_MOST_LENGTH]!r} cannot be the type of this gallery's index ({reason}); "
        "give auto, exact or another FAISS factory string"
    )
