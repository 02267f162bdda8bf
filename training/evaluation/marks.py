"""A set judged by hand: pairs of a query and a result that are right or wrong, and how a model ranks them.

Only judged pairs are measured, since nobody has looked at the others: each query's judged results are ranked
by the model's cosine, equals by their row. Precision@1 is the share of queries whose first judged result is
right. Average precision is Yilmaz and Aslam's induced one ("Estimating average precision with incomplete and
imperfect judgments", CIKM 2006), which is that of the ranking without what was not judged: 1/R · Σ over right
results of (right results down to it) / (its rank), R being how many are right.
"""

import csv
import io
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from serving.catalog.catalog import Row
from serving.errors import BadData, cause_of
from training.evaluation.metrics import Floats, unit_rows

__all__ = [
    "Mark",
    "Pairs",
    "bootstrap",
    "find_pairs",
    "induced_precision",
    "marked_metrics",
    "read_marks",
    "tell_marks",
]

_HEADER = ["query", "result", "relevant"]
_DRAWS = 2_000
"""Of a bootstrap."""

Pairs = Mapping[tuple[int, int], bool]
"""Whether a result is right for a query, by the places of both among some rows."""


class Mark(NamedTuple):
    """What somebody says of one result."""

    query: str  # the key of an image, or the file name of one
    result: str  # the key of an image
    relevant: bool


def read_marks(path: Path) -> list[Mark]:
    """Read a CSV file with the columns query, result and relevant (1 or 0), also several of them joined.

    Raises BadData, with the number of the line, where it is none.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise BadData(f"{path} cannot be read: {cause_of(error)}") from error
    except UnicodeDecodeError as error:
        raise BadData(f"{path} is not UTF-8 text at byte {error.start}; save it as UTF-8") from error
    found, header = list[Mark](), ",".join(_HEADER)
    lines = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        for cells in lines:
            where = f"line {lines.line_num} of {path}"
            cells[:1] = [cell.removeprefix("\ufeff") for cell in cells[:1]]  # of a file that was joined
            if lines.line_num == 1 and cells != _HEADER:
                raise BadData(f"{where} must be {header}, and is {','.join(cells)[:100]!r}")
            if not cells or cells == _HEADER:
                continue
            if len(cells) != 3 or not cells[0] or not cells[1] or cells[2] not in ("0", "1"):
                told = ",".join(cells)[:100]
                raise BadData(
                    f"{where} must be a query, a result, and 1 (right) or 0 (wrong), and is {told!r}"
                )
            found.append(Mark(cells[0], cells[1], cells[2] == "1"))
    except csv.Error as error:
        raise BadData(f"line {lines.line_num} of {path} is no CSV: {error}") from error
    if not found:
        raise BadData(f"{path} holds no mark; the first line is {header}, and each other one a mark")
    return found


def find_pairs(marks: Sequence[Mark], rows: Sequence[Row]) -> tuple[Pairs, list[str], int]:
    """Find the images of marks among the rows of a data set; of marks of one pair the last counts.

    A query may be the name of a file that only one row has. Gives the pairs, the names of which there is no
    row, once each, and how many marks are of an image and itself, which any model finds first.
    """
    places = {row.key: place for place, row in enumerate(rows)}
    named = defaultdict[str, list[int]](list)
    for place, row in enumerate(rows):
        for name in {PurePosixPath(row.key).name, row.image.path.name}:
            named[name].append(place)
    queries = {name: found[0] for name, found in named.items() if len(found) == 1} | places
    pairs, unknown, itself = dict[tuple[int, int], bool](), dict[str, None](), 0
    for mark in marks:
        query, result = queries.get(mark.query), places.get(mark.result)
        unknown |= dict.fromkeys(
            name for name, found in ((mark.query, query), (mark.result, result)) if found is None
        )
        if query is None or result is None:
            continue
        if query == result:
            itself += 1
        else:
            pairs[query, result] = mark.relevant
    return pairs, list(unknown), itself


def marked_metrics(embeddings: Floats, pairs: Pairs) -> dict[str, Any]:
    """Measure how embeddings (N, d), of any length, rank what was judged.

    Gives `queries` and `pairs`, how many there are, `relevant`, how many pairs are right, `decided`, how many
    queries have both a right and a wrong result (all others are alike to every model), `precision_at_1` over
    all queries, `average_precision` over the `asked` that have a right one, None without, and for both the
    95 % interval of `bootstrap` (`precision_at_1_interval`).
    """
    unit = unit_rows(embeddings.astype(np.float64))
    judged = defaultdict[int, list[int]](list)
    for query, result in sorted(pairs):
        judged[query].append(result)
    firsts, averages, decided = list[float](), list[float](), 0
    for query, results in judged.items():
        # not by a matrix product, which may round equal rows differently by their places
        cosines = np.einsum("rd,d->r", unit[results], unit[query])
        order = np.argsort(-cosines, kind="stable")
        right = np.array([pairs[query, result] for result in results])[order]
        firsts.append(float(right[0]))
        decided += bool(right.any() and not right.all())
        if right.any():
            averages.append(induced_precision(right))
    return {
        "queries": len(judged),
        "pairs": len(pairs),
        "relevant": sum(pairs.values()),
        "decided": decided,
        "precision_at_1": float(np.mean(firsts)),
        "precision_at_1_interval": bootstrap(firsts),
        "asked": len(averages),
        "average_precision": float(np.mean(averages)) if averages else None,
        "average_precision_interval": bootstrap(averages),
    }


def induced_precision(right: NDArray[np.bool_]) -> float:
    """Give the average precision of judged results (n,) in their order, at least one of which is right."""
    return float((right.cumsum() / np.arange(1, len(right) + 1))[right].mean())


def bootstrap(values: Sequence[float], *, seed: int = 0) -> tuple[float, float] | None:
    """Give the 95 % interval of the mean of n values by the percentiles of draws of n; None below two."""
    if len(values) < 2:
        return None
    rng, known = np.random.default_rng(seed), np.array(values)
    means = [known[rng.integers(0, len(known), len(known))].mean() for _ in range(_DRAWS)]
    low, high = np.percentile(means, (2.5, 97.5)).tolist()
    return low, high


def tell_marks(result: Mapping[str, Any]) -> list[str]:
    """Tell the figures of an evaluation by marks in percent, and what of the marks does not count."""
    lines = [
        f"{result['target']} on {result['marks']}: {result['pairs']} judged pairs of {result['queries']}"
        f" queries, {result['relevant']} right, {result['dimension']} dimensions, {result['seconds']:.0f} s"
    ]
    before = result["untrained"] or {}
    for name, key in (("precision@1", "precision_at_1"), ("induced AP", "average_precision")):
        if (share := result[key]) is None:
            lines.append(f"  {name:<12}none: no query has a right result")
            continue
        line = f"  {name:<12}{100 * share:6.2f} %"
        if interval := result[f"{key}_interval"]:
            low, high = (100 * each for each in interval)
            line += f"   95 % interval {low:.2f} to {high:.2f}"
        if before:
            line += f"   untrained {100 * before[key]:6.2f} %, {100 * (share - before[key]):+.2f}"
        lines.append(line)
    if result["decided"] < result["queries"]:
        lines.append(
            f"  {result['queries'] - result['decided']} queries have only right or only wrong results, which"
            " no model ranks better than another"
        )
    if result["no_untrained"]:
        lines.append(f"  the untrained backbone was not measured: {result['no_untrained']}")
    if unknown := result["unknown"]:
        first = ", ".join(map(repr, unknown[:3])) + (", …" if unknown[3:] else "")
        lines.append(
            f"  {len(unknown)} names that the data set does not have, whose marks do not count: {first}"
        )
    if result["itself"]:
        lines.append(f"  marks of an image and itself, which do not count: {result['itself']}")
    if result["trained"]:
        lines.append(f"  images of classes that trained, where figures are higher: {result['trained']}")
    return lines
