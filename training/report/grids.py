"""The section of nearest neighbours: what single queries find, right and wrong."""

from collections.abc import Mapping, Sequence

from serving.catalog.catalog import Row
from training.evaluation.ranking import Ranking
from training.report.document import Section
from training.report.markup import clip, element, percent
from training.report.picture import picture

__all__ = ["THUMBNAIL", "grids_section"]

THUMBNAIL = 96
"""Side of a picture, in pixels."""
_KINDS = {
    "best": "Best: queries of the highest average precision",
    "typical": "Typical: queries whose average precision is nearest to the median",
    "worst": "Worst: queries of the lowest average precision",
}


def grids_section(
    rows: Sequence[Row],
    ranking: Ranking,
    chosen: Mapping[str, Sequence[int]],
    pictures: Mapping[str, str],
    *,
    seed: int,
) -> Section:
    """Show each chosen query and its nearest neighbours.

    Args:
        rows: What was embedded.
        ranking: What its queries found.
        chosen: Queries by kind, as places in the ranking.
        pictures: Data URIs by key.
        seed: What drew the queries.
    """
    parts: list[str] = [
        element(
            "p",
            f"Each row is a query and what it finds, nearest first. ✓ and a whole frame: of its class."
            f" ✗ and a dashed frame: of another. The queries were chosen among {len(ranking.queries):,} by"
            f" their average precision, whose mean is MAP@R: one a class as long as there are classes, and"
            f" among equals by chance (seed {seed}).",
        )
    ]
    for kind, places in chosen.items():
        if places:
            parts.append(element("h3", _KINDS[kind]))
            parts += [_grid(rows, ranking, place, pictures) for place in places]
    return Section("neighbours", "Nearest neighbours", parts)


def _grid(rows: Sequence[Row], ranking: Ranking, place: int, pictures: Mapping[str, str]) -> str:
    query = rows[ranking.queries[place]]
    found = zip(ranking.nearest[place].tolist(), ranking.similarity[place].tolist(), strict=True)
    asked = element(
        "li",
        element(
            "figure",
            picture(pictures.get(query.key), f"Query, of {clip(query.label)}", THUMBNAIL),
            element("figcaption", element("b", "query"), element("span", clip(query.label))),
            title=clip(query.key, 200),
        ),
        class_="asked",
    )
    neighbours = (
        _neighbour(rows[row], query, rank, score, pictures) for rank, (row, score) in enumerate(found, 1)
    )
    share = percent(float(ranking.precision[place]), 1)
    return element(
        "div",
        element("h4", f"{clip(query.label)}: average precision {share}"),
        element(
            "ol",
            asked,
            *neighbours,
            class_="row",
            role="list",
            style=f"max-width: {8 * (len(ranking.nearest[place]) + 1)}rem",
        ),
        class_="query",
    )


def _neighbour(row: Row, query: Row, rank: int, score: float, pictures: Mapping[str, str]) -> str:
    right = row.label == query.label
    verdict = "right" if right else "wrong"
    alt = f"Neighbour {rank}, {verdict}: {clip(row.label)}"
    return element(
        "li",
        element(
            "figure",
            picture(pictures.get(row.key), alt, THUMBNAIL),
            element(
                "figcaption",
                element("b", f"{'✓' if right else '✗'} {score:.3f}"),
                element("span", clip(row.label)),
            ),
            title=clip(row.key, 200),
        ),
        class_=verdict,
    )
