"""Which types an index can be of: the list that "auto" chooses from, and FAISS factory strings.

FAISS takes strings whose indexes end the process later, in training, adding or searching, or that train
without end. The grammar below lets through only families that are known to be sound.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from serving.errors import InvalidArgument
from serving.gallery.index.index import exact_storage, load_faiss
from serving.gallery.index.metadata import AUTOMATIC, EXACT

__all__ = ["INDEX_TYPES", "check_recall", "check_type", "full_type", "is_small"]

_SMALL = 1 << 22  # components that one thread compares in about a millisecond
_FEW = 1000  # vectors below which nothing is trained


@dataclass(frozen=True, slots=True)
class IndexType:
    """A type that "auto" may choose beside an exact index."""

    template: str
    growth: Callable[[float, float], float]  # of its latency, from m to n vectors
    handicap: float = 1.0  # how much faster it must be to be worth the time that it takes to build
    least: int = 0  # vectors from which on it comes into question

    def factory_string(self, dimension: int, count: int) -> str:
        """Return the type for d components, of four bits for two of them, with lists for so many vectors."""
        codes = dimension // 2 if dimension % 2 == 0 else dimension
        return self.template.format(codes=codes, lists=4 * math.isqrt(count))


INDEX_TYPES = (  # beside the vectors, an item of d components takes ...
    IndexType("PQ{codes}x4fs,RFlat", lambda m, n: n / m),  # d / 4 bytes
    IndexType("HNSW16,SQ8,RFlat", lambda m, n: math.log(n) / math.log(m), 1.5),  # d + 150 bytes
    IndexType("IVF{lists},PQ{codes}x4fs,RFlat", lambda m, n: math.sqrt(n / m), least=50_000),  # d / 4 bytes
    IndexType("HNSW32,SQ8,RFlat", lambda m, n: math.log(n) / math.log(m), 2.0, least=50_000),  # d + 280 bytes
)

_SCALARS = "Flat|SQ[468]|SQfp16|SQbf16"
_GRAMMAR = re.compile(
    r"((PCAR?\d+|OPQ\d+(_\d+)?),)?"
    rf"(HNSW\d+(,({_SCALARS}))?|(IVF\d+(_HNSW\d+)?,)?({_SCALARS}|PQ\d+(x4fs|x[4-8])?))"
    rf"(,RFlat|,Refine\(({_SCALARS})\))?(,RFlat)?",
    re.ASCII,
)
_MOST_LENGTH = 100
_MOST_NUMBER = 1 << 17
_MOST_LINKS = 512
_REASON = re.compile(r"Error: '.*' failed: (.+)", re.DOTALL)


def is_small(count: int, dimension: int) -> bool:
    """Tell whether comparing every one of n vectors is fast enough."""
    return count < _FEW or count * max(dimension, 64) <= _SMALL


def check_recall(wanted: float) -> None:
    """Raise InvalidArgument for a wanted recall that is not above 0 and at most 1."""
    if not 0.0 < wanted <= 1.0:  # NaN too
        raise InvalidArgument(f"the wanted recall is {wanted}; expected more than 0 and at most 1")


def check_type(wanted: str, *, dimension: int) -> str:
    """Return `wanted` if it can be the type of an index: "auto", "exact" or a FAISS factory string."""
    if wanted != AUTOMATIC:
        full_type(wanted, dimension=dimension)
    return wanted


@lru_cache(maxsize=256)
def full_type(wanted: str, *, dimension: int) -> str:
    """Return the factory string that an index of a type is made by: with the exact vectors in it."""
    if wanted in (EXACT, "Flat"):
        return EXACT
    if len(wanted) > _MOST_LENGTH or not _GRAMMAR.fullmatch(wanted):
        raise _refusal(
            wanted,
            "expected HNSW with Flat or SQ, or Flat, SQ or PQ with or without IVF; before it PCA, PCAR, OPQ "
            "or nothing, after it RFlat, Refine or nothing",
        )
    limits = {"HNSW": (2, _MOST_LINKS)} | dict.fromkeys(("PCA", "PCAR", "_"), (1, dimension))
    for name, number in re.findall(r"(HNSW|[A-Z]+|_)(\d+)", wanted):
        least, most = limits.get(name, (1, _MOST_NUMBER))
        if not least <= int(number) <= most:
            raise _refusal(wanted, f"{name}{number} in it is not within {least} to {most}")
    if exact_storage(_made(wanted, wanted, dimension)) is not None:
        return wanted
    full = f"{wanted},RFlat"
    _made(full, wanted, dimension)
    return full


def _made(text: str, wanted: str, dimension: int) -> Any:
    faiss = load_faiss()
    try:
        return faiss.index_factory(dimension, text, faiss.METRIC_INNER_PRODUCT)
    except (RuntimeError, MemoryError) as error:
        found = _REASON.search(str(error))  # without FAISS's function and line
        reason = " ".join((found[1] if found else str(error).rsplit(": ", 1)[-1]).split()).rstrip(".")[:200]
        raise _refusal(wanted, reason or "it wants too much memory") from error


def _refusal(wanted: str, reason: str) -> InvalidArgument:
    return InvalidArgument(
        f"{wanted[:_MOST_LENGTH]!r} cannot be the type of this gallery's index ({reason}); "
        "give auto, exact or another FAISS factory string"
    )
