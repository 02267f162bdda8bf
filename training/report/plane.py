"""The section of the projection: all embeddings on a plane."""

from collections.abc import Sequence

import numpy as np

from training.report.document import Section
from training.report.findings import Findings
from training.report.markup import clip, element, percent
from training.report.projection import project
from training.report.scatter import MARKS, scatter

__all__ = ["plane_section"]

_POINTS = 3000
"""Most points that are drawn."""


def plane_section(findings: Findings, queries: Sequence[str], *, seed: int) -> Section:
    """Draw the embeddings along their first two principal components.

    Args:
        findings: What was embedded; all of it makes the axes.
        queries: Classes of the queries above, which are told apart by colour and mark.
        seed: Draws the points where there are too many.
    """
    plane = project(findings.embeddings)
    count = len(findings.rows)
    drawn = np.arange(count)
    if count > _POINTS:
        drawn = np.sort(np.random.default_rng(seed).choice(count, _POINTS, replace=False))
    rows = [findings.rows[place] for place in drawn.tolist()]
    shown = list(dict.fromkeys(queries))[: len(MARKS)]
    first, second = (percent(share, 1) for share in plane.explained)
    told = (
        f"Principal components of the {count:,} embeddings at unit length: the two directions along which"
        f" they differ most, which hold {first} and {second} of their variance. What is far apart here"
        " is far apart; what is near here need not be, for the other directions are not seen."
    )
    if count > _POINTS:
        told += f" {_POINTS:,} points, drawn at random (seed {seed}), are shown."
    drawing = scatter(
        plane.points[drawn],
        [row.label for row in rows],
        [f"{clip(row.label)} – {clip(row.key)}" for row in rows],
        shown,
        axes=(f"first component ({first})", f"second component ({second})"),
    )
    return Section(
        "plane",
        "Embeddings on a plane",
        [
            element("p", told),
            element("p", f"Marked are {len(shown)} classes of the queries above.", class_="soft"),
            drawing,
        ],
    )
