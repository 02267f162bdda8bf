"""Which types an index can be of; choosing one, finding its search parameters, measuring its recall.

FAISS takes factory strings whose indexes end the process later, in training, adding or searching, or that
train without end. The grammar below lets through only families that are known to be sound.

A stored vector is an easy query: a graph was built to lead to it. A vector shifted at random is no query that
anybody asks: nearly all directions lead away from where the vectors are. So each query lies beside a stored
vector, in the direction from one of its neighbours to another, 0.6 times as far as its tenth neighbour. On
clustered vectors the recall is then within a percent of that of vectors held out of the index.
"""

import math
import re
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.errors import InvalidArgument
from serving.gallery.index.builder import Advance, IndexBuilder, Untrainable
from serving.gallery.index.index import (
    AUTOMATIC,
    EXACT,
    MEASURED_K,
    SCORE_ERROR,
    SPARE,
    IndexMetadata,
    Trial,
    exact_storage,
    load_faiss,
    set_parameters,
)

__all__ = [
    "INDEX_TYPES", "GroundTruth", "build_index", "check_type", "check_wanted", "full_type", "is_small",
    "measure_again", "measured", "tuned",
]  # fmt: skip

_SMALL = 1 << 22  # components that one thread compares in about a millisecond
_FEW = 1000  # vectors below which nothing is trained
_SAMPLE = 20_000  # vectors that types are tried on
_SAMPLE_COMPONENTS = 1 << 24
_LEAST_SAMPLE = 1000
_QUERIES = 500
_SHIFT = 0.6  # of the distance of the tenth neighbour
_TIMED = 40
_STEPS = [*range(1, 16), *(2**octave * part // 8 for octave in range(4, 10) for part in range(8, 16)), 1024]
# A graph that looks at fewer nodes than it is to fetch is hardly faster, and told of as better than it is.
_BREADTHS = {"nprobe": _STEPS, "efSearch": [step for step in _STEPS if step > MEASURED_K + SPARE]}
# How many candidates are compared exactly for each one wanted while the breadth is looked for: lists are
# coarse, and a graph looks at least at as many nodes.
_FACTOR_FOR = {"nprobe": 32, "efSearch": 2}
_REFINE = "k_factor_rf"
_FACTORS = (1, 2, 4, 8, 16, 32, 64, 128)
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


@dataclass(frozen=True, slots=True)
class IndexType:
    """A type that "auto" may choose beside an exact index."""

    template: str
    growth: Callable[[float, float], float]  # of its latency, from m to n vectors
    handicap: float = 1.0  # how much faster it must be to be worth the time that it takes to build
    least: int = 0  # vectors from which on it comes into question
    least_dimension: int = 0  # likewise

    def factory_string(self, dimension: int, count: int) -> str:
        """Return the type for d components, of four bits for two of them, with lists for so many vectors."""
        codes = dimension // 2 if dimension % 2 == 0 else dimension
        reduced = min(dimension, 128, max(64, dimension // 4))
        return self.template.format(codes=codes, lists=4 * math.isqrt(count), reduced=reduced)


INDEX_TYPES = (  # beside the vectors, an item of d components takes ...
    IndexType("PQ{codes}x4fs,RFlat", lambda m, n: n / m),  # d / 4 bytes
    IndexType("HNSW16,SQ8,RFlat", lambda m, n: math.log(n) / math.log(m), 1.5),  # d + 150 bytes
    IndexType("IVF{lists},PQ{codes}x4fs,RFlat", lambda m, n: math.sqrt(n / m), least=50_000),  # d / 4 bytes
    IndexType("HNSW32,SQ8,RFlat", lambda m, n: math.log(n) / math.log(m), 2.0, least=50_000),  # d + 280 bytes
    # Fewer dimensions, where they suffice: 344 to 408 bytes.
    IndexType(
        "PCA{reduced},HNSW32,SQ8,RFlat", lambda m, n: math.log(n) / math.log(m), 1.5, least_dimension=128
    ),
)


def build_index(
    builder: IndexBuilder, *, wanted: str, wanted_recall: float, advance: Advance
) -> IndexMetadata:
    """Make of the vectors in a builder the index that is wanted; returns what it became and does.

    An automatic choice must reach the wanted recall; of a given type the parameters aim at it.
    """
    began = time.monotonic()
    types, trials, note = [EXACT], list[Trial](), ""
    if wanted == AUTOMATIC:
        types, trials = _tried(builder.matrix, wanted_recall, threads=builder.threads, advance=advance)
    else:
        try:
            types.insert(0, full_type(wanted, dimension=builder.matrix.shape[1]))
        except InvalidArgument as error:  # an earlier version took it
            note = str(error)
    for type_ in types:  # an exact index is the last
        made = IndexMetadata(type=type_, wanted=wanted, wanted_recall=wanted_recall)
        try:
            builder.become(type_, advance)
        except Untrainable as error:
            note = str(error)
            continue
        advance("measure", 0, 1)
        made = _measured(builder, made)
        advance("measure", 1, 1)
        if wanted != AUTOMATIC or made.recall >= wanted_recall:
            break
    seconds = round(time.monotonic() - began, 3)
    return replace(made, trials=tuple(trials), note=note, count=len(builder), build_seconds=seconds)


def measure_again(builder: IndexBuilder, before: IndexMetadata, *, added: int) -> IndexMetadata:
    """Return the metadata of an index that was added to."""
    return replace(_measured(builder, before), extended=before.extended + added)


def _tried(
    matrix: NDArray[np.float32], wanted: float, *, threads: int, advance: Advance
) -> tuple[list[str], list[Trial]]:
    """Return the types that reach the recall on a sample of vectors (n, d), best first, and all trials."""
    count, dimension = matrix.shape
    if is_small(count, dimension):
        return [EXACT], []
    size = min(count, _SAMPLE, max(_LEAST_SAMPLE, _SAMPLE_COMPONENTS // dimension))
    # The same vectors each time, so that a rebuild of the same gallery chooses the same.
    drawn = np.sort(np.random.default_rng(0).choice(count, size, replace=False))
    builder = IndexBuilder.of(matrix[drawn], threads=threads)
    exact = _latency_ms(builder)
    trials, costs = [Trial(EXACT, 1.0, exact, 0.0)], {EXACT: exact * count / size}
    truth, known = GroundTruth.of(builder), IndexMetadata(wanted_recall=wanted)
    found = [each for each in INDEX_TYPES if count >= each.least and dimension >= each.least_dimension]
    for done, each in enumerate(found):
        type_ = each.factory_string(dimension, size)
        try:
            seconds = builder.become(type_, lambda *_: advance("try", done, len(found)))  # noqa: B023
        except Untrainable:
            continue
        result = tuned(builder, truth, known)
        trials.append(Trial(type_, result.recall, result.latency_ms, round(seconds, 3)))
        if result.recall >= wanted:
            cost = result.latency_ms * each.growth(size, count) * each.handicap
            costs[each.factory_string(dimension, count)] = cost
    advance("try", len(found), len(found))
    order = sorted(costs, key=lambda type_: costs[type_])
    return order[: order.index(EXACT) + 1], trials


@dataclass(frozen=True, slots=True)
class GroundTruth:
    """Queries of which it is known what they should find."""

    queries: NDArray[np.float32]  # unit vectors (Q, d)
    least: NDArray[np.float32]  # the score of the k-th nearest, less what rounding can change (Q,)
    k: int  # 10, or the number of vectors where that is less

    @classmethod
    def of(cls, builder: IndexBuilder) -> "GroundTruth":
        """Draw queries beside the vectors of an index, and find their nearest by comparing every vector."""
        chance = np.random.default_rng(0)
        matrix, count = builder.matrix, len(builder)
        rows = matrix[np.sort(chance.choice(count, min(count, _QUERIES), replace=False))]
        # Both (Q, 11); each finds itself.
        scores, near = builder.search(rows, min(MEASURED_K + 1, count), exact=True)
        reach = np.sqrt(np.maximum(0.0, 2.0 - 2.0 * scores[:, -1:]))  # (Q, 1), distances of unit vectors
        pairs = chance.permuted(near[:, 1:], axis=1)[:, :2]  # (Q, 2), two neighbours of each
        along = matrix[pairs[:, 0]] - matrix[pairs[:, -1]] if pairs.size else np.zeros_like(rows)
        queries = _unit(rows + _SHIFT * reach * _unit(along)).astype(np.float32)
        k = min(MEASURED_K, count)
        scores, _ = builder.search(queries, k, exact=True)
        return cls(queries, scores[:, k - 1] - SCORE_ERROR, k)


def tuned(builder: IndexBuilder, truth: GroundTruth, metadata: IndexMetadata) -> IndexMetadata:
    """Find the cheapest search parameters that reach the wanted recall, or come nearest, and leave them set.

    Returns the metadata, which tells what is wanted, with them and the recall and latency that they give.
    """
    wanted, answers = metadata.wanted_recall, len(truth.queries) * truth.k
    # One standard error more, so that it is not by luck with these queries that the recall is reached.
    enough = wanted + math.sqrt(wanted * (1 - wanted) / answers)
    tried: list[tuple[float, Mapping[str, float]]] = []

    def reaches(parameters: Mapping[str, float]) -> bool:
        tried.append((measured(builder, truth, parameters), parameters))
        return tried[-1][0] >= enough

    _climb(builder.index, reaches)
    reaching = [each for each in tried if each[0] >= enough]
    recall, parameters = reaching[-1] if reaching else max(tried, key=lambda each: each[0])
    set_parameters(builder.index, parameters)
    asked, latency_ms = len(truth.queries), _latency_ms(builder)
    return replace(metadata, recall=recall, queries=asked, latency_ms=latency_ms, parameters=parameters)


def measured(builder: IndexBuilder, truth: GroundTruth, parameters: Mapping[str, float]) -> float:
    """Set search parameters and return the recall: the share of the k nearest, or of their equals, found."""
    set_parameters(builder.index, parameters)
    scores, _ = builder.search(truth.queries, min(len(builder), MEASURED_K + SPARE))
    return float((scores[:, : truth.k] >= truth.least[:, None]).mean())


def _climb(index: Any, reaches: Callable[[Mapping[str, float]], bool]) -> None:
    """Find the narrowest search that reaches; then, from the least on, candidates to compare."""
    space = load_faiss().ParameterSpace()
    space.initialize(index)
    knobs = [space.parameter_ranges.at(at).name for at in range(space.parameter_ranges.size())]
    wide: dict[str, float] = {}
    refines = _REFINE in knobs
    breadth = next((name for name in _BREADTHS if name in knobs), None)
    if breadth is not None:
        generous = {_REFINE: _FACTOR_FOR[breadth]} if refines else {}
        values = _BREADTHS[breadth]
        at = bisect_left(values[:-1], True, key=lambda value: reaches({breadth: value, **generous}))
        wide = {breadth: values[at]}
    if refines:
        for factor in _FACTORS:
            if reaches({**wide, _REFINE: factor}):
                break
    else:
        reaches(wide)


def _measured(builder: IndexBuilder, metadata: IndexMetadata) -> IndexMetadata:
    if metadata.type == EXACT:
        return replace(metadata, latency_ms=_latency_ms(builder))
    return tuned(builder, GroundTruth.of(builder), metadata)


def _latency_ms(builder: IndexBuilder) -> float:
    """Return the median milliseconds of one query on one thread, asked for vectors of the index."""
    count = len(builder)
    seconds = []
    for query in builder.matrix[np.linspace(0, count - 1, min(count, _TIMED)).astype(np.int64)]:
        began = time.thread_time()  # of this thread's work, so that a busy machine changes no choice
        builder.search(query[None], min(count, MEASURED_K + SPARE))
        seconds.append(time.thread_time() - began)
    return round(1e3 * float(np.median(seconds)), 4)


def _unit(rows: NDArray[np.floating[Any]]) -> NDArray[np.floating[Any]]:
    """Return rows (n, d) divided by their norms; a row of zeros stays one."""
    return np.asarray(rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30))


def is_small(count: int, dimension: int) -> bool:
    """Tell whether comparing every one of n vectors is fast enough."""
    return count < _FEW or count * max(dimension, 64) <= _SMALL


def check_wanted(index: str | None, recall: float | None, dimension: int) -> None:
    """Refuse an index or a recall that cannot be had; None is as it was."""
    if recall is not None and not 0.0 < recall <= 1.0:  # NaN too
        raise InvalidArgument(f"the wanted recall is {recall}; expected more than 0 and at most 1")
    if index is not None:
        check_type(index, dimension=dimension)


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
