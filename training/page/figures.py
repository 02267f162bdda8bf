"""The section of figures: how well images of one class find each other, as noted and as measured now."""

from collections.abc import Mapping
from typing import Any, TypeGuard

from training.history import History
from training.page.document import Section
from training.page.markup import clip, element, percent, table

__all__ = ["figures_section", "key_figures"]

_NOTED = {
    "test": "unseen classes (test), as noted in the run",
    "train": "training classes, as noted in the run",
    "all": "all classes, as noted in the run",
    "validation": "validation classes, of the epoch that is kept",
}
_COLUMNS = ("R@1", "R@2", "R@4", "R@8", "MAP@R", "R-precision")


def figures_section(
    record: Mapping[str, Any], history: History, measured: Mapping[str, Any], *, title: str, note: str
) -> Section:
    """Tabulate what the run's record holds, what was measured for this page, and the untrained start.

    Args:
        record: Of the run.
        history: Of the run; its epoch 0 is the start.
        measured: What `measure_retrieval` gives, with `images` and `classes`.
        title: What was measured.
        note: What is to be said of it.
    """
    rows = [[title, *_figures(measured)]]
    noted = record.get("metrics", {})
    for name, found in noted.items():
        if isinstance(found, dict) and ("map_at_r" in found or "recall_at" in found):
            rows.append([_NOTED.get(name, f"{clip(name)}, as noted in the run"), *_figures(found)])
    start = next((row for row in history.rows if row["epoch"] == 0), {})
    if "map_at_r" in start or "recall_at_1" in start:
        before = {"recall_at": {"1": start.get("recall_at_1")}, "map_at_r": start.get("map_at_r")}
        rows.append(["validation classes, before training", *_figures(before)])
    return Section(
        "figures",
        "Figures",
        [
            element("p", note),
            table(["on", *_COLUMNS, "images", "classes"], rows, caption="Retrieval of images of one class"),
            element(
                "p",
                "Each image is searched among the others by cosine. R@k: share of queries with an image of"
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


def _figures(found: Mapping[str, Any]) -> list[str]:
    """Give a cell a column; a record may lack any, or hold something else."""
    recalls = found.get("recall_at")
    recalls = recalls if isinstance(recalls, dict) else {}
    shares = [recalls.get(name.removeprefix("R@")) for name in _COLUMNS if name.startswith("R@")]
    shares += [found.get("map_at_r"), found.get("r_precision")]
    counts = [found.get("images"), found.get("classes")]
    return [
        *(percent(share) if _is_number(share) else "–" for share in shares),
        *(f"{count:,}" if _is_number(count) else "–" for count in counts),
    ]


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
