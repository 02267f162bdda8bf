"""The section of prototype histograms: which prototypes each class is made of."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from training.report.document import Section
from training.report.markup import Markup, clip, element, percent

__all__ = ["class_histograms", "histograms_section"]

_CLASSES = 40
"""Most classes that are shown."""
_LEVELS = 20
"""Steps of shade."""
_STRONGEST = 3


def histograms_section(
    histograms: NDArray[np.float32], labels: NDArray[np.int64], classes: Sequence[str], *, trained: bool
) -> Section:
    """Draw classes x prototypes, a class a row.

    Args:
        histograms: Of N images, (N, m), each row summing to one.
        labels: Places in `classes`, (N,).
        classes: Names, each of at least one image.
        trained: Whether anything trained the prototypes.
    """
    means = class_histograms(histograms, labels, len(classes))  # (C, m)
    shown = np.unique(np.linspace(0, len(classes) - 1, min(len(classes), _CLASSES)).round().astype(int))
    largest = max(float(means[shown].max()), 1e-12)
    count = means.shape[1]
    used = int((np.bincount(means.argmax(axis=1), minlength=count) > 0).sum())
    told = (
        f"The mean share of each of the {count} prototypes in the images of a class (z of eq. 2.4): the more"
        f" strongly a bar is coloured, the larger the share, from none to {percent(largest, 1)}. Of the"
        f" prototypes, {used} are the strongest of some class."
    )
    parts: list[str] = [element("p", told)]
    if not trained:
        parts.append(_untrained())
    if len(shown) < len(classes):
        parts.append(
            element("p", f"{len(shown)} of {len(classes)} classes are shown, evenly spaced by name.")
        )
    head = element(
        "tr",
        element("th", "class", scope="col"),
        element(
            "th", element("span", "prototype 0"), element("span", str(count - 1)), scope="col", class_="ends"
        ),
        element("th", "strongest", scope="col"),
    )
    lines = (
        element(
            "tr",
            element("th", clip(classes[place]), scope="row"),
            element("td", _strip(means[place] / largest), class_="strip"),
            element("td", _strongest(means[place])),
        )
        for place in shown.tolist()
    )
    made = element(
        "table",
        element("caption", "Mean histogram of each class"),
        element("thead", head),
        element("tbody", *lines),
        class_="heat",
    )
    parts.append(
        element("div", made, class_="wide", tabindex="0", role="region", aria_label="Histograms by class")
    )
    return Section("histograms", "Prototype histograms", parts)


def class_histograms(
    histograms: NDArray[np.float32], labels: NDArray[np.int64], count: int
) -> NDArray[np.float64]:
    """Give the mean histogram of each class, (C, m), of histograms (N, m)."""
    sums = np.zeros((count, histograms.shape[1]))
    np.add.at(sums, labels, histograms)
    return sums / np.bincount(labels, minlength=count)[:, None]


def _strip(shares: NDArray[np.float64]) -> Markup:
    """Draw shares, (m,) in 0..1, as bars of m shades; those of one shade are one group."""
    levels = np.round(shares * _LEVELS).astype(int)
    groups = []
    for level in np.unique(levels[levels > 0]).tolist():
        places = np.flatnonzero(levels == level).tolist()
        bars = (element("rect", x=place, width=1, height=1) for place in places)
        groups.append(element("g", *bars, fill_opacity=level / _LEVELS))
    return element(
        "svg",
        *groups,
        viewBox=f"0 0 {len(shares)} 1",
        preserveAspectRatio="none",
        aria_hidden="true",  # the column beside it says it in figures
    )


def _strongest(means: NDArray[np.float64]) -> str:
    places = np.argsort(-means, kind="stable")[:_STRONGEST].tolist()
    return ", ".join(f"{place} ({percent(means[place], 0)})" for place in places)


def _untrained() -> Markup:
    return element(
        "p",
        "Nothing in the recipe trains prototypes (xml_weight and reconstruction_weight are 0), so that they"
        " are as they were at the start: what they show is no result of training.",
    )
