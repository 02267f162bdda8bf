"""The section of figures: how well images of one class find each other, as noted and as measured now."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeGuard

from training.evaluation.metrics import FIGURE_NAMES
from training.loop.logbook import History
from training.report.document import Section
from training.report.markup import clip, element, percent, table

__all__ = ["figures_section", "key_figures"]

_NOTED = {
    "test": "unseen classes (test), as noted in the run",
    "train": "training classes, as noted in the run",
    "all": "all classes, as noted in the run",
    "validation": "validation classes, of the epoch that is kept",
}
_COUNTS = {"images": "images", "classes": "classes"}


def figures_section(
    record: Mapping[str, Any], history: History, measured: Mapping[str, Any], *, title: str, note: str
) -> Section:
    """Tabulate what the run's record holds, what was measured for this page, and the untrained network.

    Args:
        record: Of the run; what `evaluate` noted there has the untrained backbone's figures beside.
        history: Of the run; its epoch 0 is the start.
        measured: What `measure_retrieval` gives, with `images` and `classes`.
        title: What was measured.
        note: What is to be said of it.
    """
    found = {title: measured}
    for name, noted in record.get("metrics", {}).items():
        if isinstance(noted, dict) and ("map_at_r" in noted or "recall_at" in noted):
            told = _NOTED.get(name, f"{clip(name)}, as noted in the run")
            found[told] = noted
            if isinstance(noted.get("untrained"), dict):
                found[f"{told}: the untrained backbone"] = noted["untrained"]
    start = next((row for row in history.rows if row["epoch"] == 0), {})
    if "map_at_r" in start or "recall_at_1" in start:
        before = {"recall_at": {"1": start.get("recall_at_1")}, "map_at_r": start.get("map_at_r")}
        found["validation classes, before training"] = before
    columns = _columns(found.values())
    apart = bool(measured.get("gallery"))
    how = "Each query is searched in the gallery" if apart else "Each image is searched among the others"
    rows = [
        [name, *(spell(value.get(key)) for key, (_, spell) in columns.items())]
        for name, value in ((name, _flat(value)) for name, value in found.items())
    ]
    return Section(
        "figures",
        "Figures",
        [
            element("p", note),
            table(
                ["on", *(spelled for spelled, _ in columns.values())],
                rows,
                caption="Retrieval of images of one class",
                numbers=True,
            ),
            element(
                "p",
                f"{how} by cosine. R@k: share of queries with an image of"
                " their class among the k nearest. R-precision: share of right ones among the R nearest, R"
                " being how many there are. MAP@R: the same, counting higher what comes earlier.",
                class_="soft",
            ),
        ],
    )


def key_figures(measured: Mapping[str, Any]) -> str:
    """Show the few figures that one looks for first."""
    shown = {
        "MAP@R": percent(measured["map_at_r"]),
        "R@1": percent(measured["recall_at"]["1"]),
        "images": f"{measured['images']:,}",
        "classes": f"{measured['classes']:,}",
    }
    return element(
        "dl",
        *(element("div", element("dt", name), element("dd", value)) for name, value in shown.items()),
        class_="key",
    )


def _columns(found: Iterable[Mapping[str, Any]]) -> Mapping[str, tuple[str, Callable[[object], str]]]:
    """Give a heading and the way to write a cell by key; only of what any of them holds."""
    held = {key for each in found for key, value in _flat(each).items() if _is_number(value)}
    recalls = sorted((key for key in held if key.startswith("R@")), key=lambda key: int(key[2:]))
    return (
        {key: (key, _share) for key in recalls}
        | {key: (name, _share) for key, name in FIGURE_NAMES.items() if key in held}
        | {key: (name, _whole) for key, name in _COUNTS.items() if key in held}
    )


def _flat(found: Mapping[str, Any]) -> dict[str, Any]:
    """Put `recall_at` beside the rest, as `R@k`; a record may lack any of it, or hold something else."""
    recalls = found.get("recall_at")
    recalls = recalls if isinstance(recalls, dict) else {}
    return dict(found) | {f"R@{k}": share for k, share in recalls.items() if str(k).isdecimal()}


def _share(value: object) -> str:
    return percent(value) if _is_number(value) else "–"


def _whole(value: object) -> str:
    return f"{value:,}" if _is_number(value) else "–"


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
