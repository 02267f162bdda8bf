"""The section of curves: what each epoch measured."""

from collections.abc import Sequence

from training.loop.logbook import History
from training.report.document import Section
from training.report.linechart import Series, line_chart
from training.report.markup import element, number, table

__all__ = ["curves_section"]

_POINTS = 400
"""Most epochs that are drawn."""
_LINES = 60
"""Most epochs in the table."""
_NAMES = {
    "loss": "whole loss",
    "dml": "loss of embeddings (dml)",
    "xml": "cross-batch loss (xml)",
    "map_at_r": "MAP@R",
    "recall_at_1": "R@1",
    "prototypes_in_use": "prototypes in use, of a batch",
    "prototypes_an_image": "prototypes in use, of an image",
    "eigenvalues": "eigenvalues above the ridge",
    "expressed_cosine": "between images of different classes",
    "rebuilt_cosine": "to the embedding itself",
    "xml_gradient_share": "XML's gradient to that of the loss",
}
_PANELS = (
    ("Loss and its parts", "loss", ("loss", "dml", "xml")),
    ("On the validation classes", "percent", ("map_at_r", "recall_at_1")),
    (
        "How many prototypes are at work",
        "prototypes",
        ("prototypes_in_use", "prototypes_an_image", "eigenvalues"),
    ),
    ("Cosines of embeddings expressed by the other half", "cosine", ("expressed_cosine", "rebuilt_cosine")),
    ("How hard the cross-batch term pulls at the head", "percent", ("xml_gradient_share",)),
    ("Learning rate", "rate of the first group", ("learning_rate",)),
)


def curves_section(history: History, *, validated: bool, note: str | None = None) -> Section:
    """Draw every figure of the history, those that belong together in one frame.

    Args:
        history: Of the run.
        validated: Whether the run held out classes to measure itself on.
        note: What is to be said of the cross-batch term.
    """
    drawn = history.thinned(_POINTS)
    panels = list(_PANELS)
    known = {name for _, _, names in panels for name in names} | {"steps"}
    panels += [
        (_spelled(name).capitalize(), _spelled(name), (name,)) for name in history.names if name not in known
    ]
    charts = []
    for title, unit, names in panels:
        factor = 100 if unit == "percent" else 1
        series = [_series(drawn, name, factor) for name in names]
        # a term without weight is all zeros: no line
        series = [line for line in series if any(value for _, value in line.points)]
        if series:
            charts.append(line_chart(title, series, unit=unit))
    parts: list[str] = []
    if not charts:
        parts.append(element("p", "The run has no figures of an epoch that could be drawn (metrics.csv)."))
    if not validated:
        parts.append(
            element("p", "The run held out no classes for validation, so that no epoch was measured and the"
                    " last one was kept.")
        )  # fmt: skip
    if note:
        parts.append(element("p", note))
    if len(drawn.rows) < len(history.rows):
        parts.append(
            element("p", f"{len(drawn.rows)} of {len(history.rows)} epochs are drawn, evenly spaced.")
        )
    if charts:
        parts += [element("div", *charts, class_="charts"), _numbers(history)]
    return Section("curves", "Curves", parts)


def _series(history: History, name: str, factor: float) -> Series:
    return Series(_spelled(name), [(epoch, factor * value) for epoch, value in history.points(name)])


def _numbers(history: History) -> str:
    few = history.thinned(_LINES)
    names = few.names
    rows: Sequence[Sequence[str]] = [
        [f"{row['epoch']:g}", *(number(row[name]) if name in row else "–" for name in names)]
        for row in few.rows
    ]
    caption = "Figures of each epoch" if len(few.rows) == len(history.rows) else "Figures of some epochs"
    return element(
        "details",
        element("summary", "The figures as a table"),
        table(["epoch", *map(_spelled, names)], rows, caption=caption, numbers=True),
    )


def _spelled(name: str) -> str:
    return _NAMES.get(name, name.replace("_", " "))
