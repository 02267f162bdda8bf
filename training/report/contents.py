"""What the page shows, made ready for its template: tables, plots and pictures."""

import math
import re
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from numpy.typing import NDArray

from serving.catalog.catalog import Row
from training.evaluation.metrics import FIGURE_NAMES
from training.loop.logbook import History
from training.loop.run import Run
from training.recipes.recipe import Recipe
from training.report import figures
from training.report.findings import (
    Findings,
    Ranking,
    choose_queries,
    class_histograms,
    find_assignments,
    project,
    rank,
)

__all__ = [
    "SPLITS", "describe_settings", "plot_curves", "render_page", "show_pictures", "tabulate_figures",
    "tabulate_histograms",
]  # fmt: skip

SPLITS = {"test": "unseen classes (test)", "train": "training classes", "all": "all classes"}
_THUMBNAIL, _MAP = 96, 160
"""Sides of a neighbour and of a mapped image, in pixels."""
_MAPS, _CLASSES, _PLANE, _EPOCHS, _LINES = 12, 40, 3000, 400, 60
"""Most prototype maps, classes with a histogram, points on the plane, epochs in a curve and in the table."""
_COUNTS = ("images", "classes")
_PANELS: tuple[tuple[str, str, dict[str, str]], ...] = (
    (
        "Loss and its parts",
        "loss",
        {"loss": "whole loss", "dml": "loss of embeddings (dml)", "xml": "cross-batch loss (xml)"},
    ),
    ("On the validation classes", "percent", {"map_at_r": "MAP@R", "recall_at_1": "R@1"}),
    (
        "How many prototypes are at work",
        "prototypes",
        {
            "prototypes_in_use": "prototypes in use, of a batch",
            "prototypes_an_image": "prototypes in use, of an image",
            "eigenvalues": "eigenvalues above the ridge",
        },
    ),
    (
        "Cosines of embeddings expressed by the other half",
        "cosine",
        {
            "expressed_cosine": "between images of different classes",
            "rebuilt_cosine": "to the embedding itself",
        },
    ),
    (
        "How hard the cross-batch term pulls at the head",
        "percent",
        {"xml_gradient_share": "XML's gradient to that of the loss"},
    ),
    ("Learning rate", "rate of the first group", {"learning_rate": "learning rate"}),
)
"""Which columns of metrics.csv share a frame, its title and unit, and what they are called."""
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


def render_page(**shown: Any) -> bytes:
    """Fill the template; all text is escaped, and a byte of a path that is not UTF-8 is written as hex."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # a control character is not allowed in HTML, not even escaped
        finalize=lambda value: _CONTROL.sub("\ufffd", value) if type(value) is str else value,
    )
    environment.filters |= {"clip": _clip, "percent": _percent, "told": _told}
    style = Path(__file__).with_name("style.css").read_text(encoding="utf-8")
    text = environment.get_template("page.html").render(shown, colours=figures.COLOURS, style=style)
    return text.encode("utf-8", "backslashreplace")


def tabulate_figures(
    record: Mapping[str, Any], history: History, measured: Mapping[str, Any], *, title: str
) -> dict[str, dict[str, str]]:
    """Tabulate what the run's record holds, what was measured for this page, and the untrained network.

    Args:
        record: Of the run; what `evaluate` noted there has the untrained backbone's figures beside.
        history: Of the run; its epoch 0 is the start.
        measured: What `measure_retrieval` gives, with `images` and `classes`.
        title: What was measured.

    Returns:
        Cells by column, by row; only columns of which any row holds a number.
    """
    found = {title: measured}
    for name, noted in record.get("metrics", {}).items():
        if isinstance(noted, dict) and ("map_at_r" in noted or "recall_at" in noted):
            told = f"{SPLITS.get(name, _clip(name))}, as noted in the run"
            if name == "validation":
                told = "validation classes, of the epoch that is kept"
            found[told] = noted
            if isinstance(noted.get("untrained"), dict):
                found[f"{told}: the untrained backbone"] = noted["untrained"]
    start = next((row for row in history.rows if row["epoch"] == 0), {})
    if "map_at_r" in start or "recall_at_1" in start:
        before = {"recall_at": {"1": start.get("recall_at_1")}, "map_at_r": start.get("map_at_r")}
        found["validation classes, before training"] = before
    cells = {name: _cells(each) for name, each in found.items()}
    held = {heading for each in cells.values() for heading in each}
    recalls = sorted(
        (heading for heading in held if heading.startswith("R@")), key=lambda name: int(name[2:])
    )
    columns = [*recalls, *(name for name in (*FIGURE_NAMES.values(), *_COUNTS) if name in held)]
    return {name: {column: each.get(column, "–") for column in columns} for name, each in cells.items()}


def _cells(found: Mapping[str, Any]) -> dict[str, str]:
    """Write the numbers of a row by their headings; a record may lack any of them, or hold something else."""
    recalls = found.get("recall_at")
    shares = (
        {f"R@{k}": recalls[k] for k in recalls if str(k).isdecimal()} if isinstance(recalls, dict) else {}
    )
    shares |= {heading: found.get(key) for key, heading in FIGURE_NAMES.items()}
    told = {heading: _percent(share) for heading, share in shares.items() if _is_number(share)}
    return told | {name: f"{found[name]:,}" for name in _COUNTS if _is_number(found.get(name))}


def plot_curves(history: History) -> dict[str, Any]:
    """Plot every figure of the history, those that belong together in one frame, and tabulate them."""
    drawn, few = history.thinned(_EPOCHS), history.thinned(_LINES)
    known = {name: label for _, _, labels in _PANELS for name, label in labels.items()}
    labels = {name: known.get(name, name.replace("_", " ")) for name in history.names}
    others = [
        (label.capitalize(), label, {name: label})
        for name, label in labels.items()
        if name not in known and name != "steps"
    ]
    charts = []
    for title, unit, lines in (*_PANELS, *others):
        factor = 100 if unit == "percent" else 1
        series = {
            label: [(epoch, factor * value) for epoch, value in drawn.points(name)]
            for name, label in lines.items()
            if any(value for _, value in drawn.points(name))  # a term without weight is all zeros: no line
        }
        if series:
            told = f"{title} by epoch. {' '.join(_tell(name, points) for name, points in series.items())}"
            charts.append({"title": title, "plot": figures.line_chart(series, unit=unit), "alt": told})
    rows = [[f"{row['epoch']:g}", *(f"{row[name]:.4g}" if name in row else "–" for name in few.names)]
            for row in few.rows]  # fmt: skip
    return {
        "charts": charts,
        "epochs": len(history.rows),
        "drawn": len(drawn.rows),
        "names": ["epoch", *(labels[name] for name in few.names)],
        "rows": rows,
    }


def _tell(name: str, points: Sequence[tuple[float, float]]) -> str:
    """Say a line in words, for whoever does not see it."""
    (first, begin), (last, end) = points[0], points[-1]
    if first == last:
        return f"{name}: {begin:.4g} at epoch {first:g}."
    return f"{name}: from {begin:.4g} at epoch {first:g} to {end:.4g} at epoch {last:g}."


def show_pictures(
    findings: Findings, loaded: Run, *, queries: int, neighbours: int, seed: int
) -> dict[str, Any]:
    """Make what shows images: the grids, the plane and the maps."""
    ranking = rank(findings, neighbours=neighbours)
    chosen = choose_queries(ranking.precision, findings.labels[ranking.queries], count=queries, seed=seed)
    places = list(chain.from_iterable(chosen.values()))
    asked = [findings.rows[row] for row in ranking.queries[places].tolist()]
    near = [findings.rows[row] for row in ranking.nearest[places].flatten().tolist()]
    shown = list({row.key: row for row in [*asked, *near]}.values())
    uris = {
        key: figures.jpeg(pixels)
        for key, pixels in figures.thumbnails(shown, loaded.recipe, side=_THUMBNAIL).items()
    }
    count = min(len(asked), _MAPS)  # evenly, so that best, typical and worst are among them
    spread = [asked[place * len(asked) // count] for place in range(count)]
    return {
        "asked": len(ranking.queries),
        "grids": {
            kind: [_grid(findings, ranking, place, uris) for place in found] for kind, found in chosen.items()
        },
        "plane": _plane(findings, [row.label for row in asked], seed=seed),
        "maps": _maps(loaded, spread),
        "grid": loaded.embedder.grid,
        "numbered": loaded.embedder.grid[1] <= figures.NUMBERED,
    }


def _grid(findings: Findings, ranking: Ranking, place: int, uris: Mapping[str, str]) -> dict[str, Any]:
    query = findings.rows[ranking.queries[place]]
    found = zip(ranking.nearest[place].tolist(), ranking.similarity[place].tolist(), strict=True)
    near = [(findings.rows[row], score) for row, score in found]
    return {
        "label": query.label,
        "key": query.key,
        "uri": uris.get(query.key),
        "precision": ranking.precision[place],
        "found": [
            {"label": row.label, "key": row.key, "uri": uris.get(row.key), "score": score,
             "verdict": "right" if row.label == query.label else "wrong"}
            for row, score in near
        ],
    }  # fmt: skip


def _plane(findings: Findings, queries: Sequence[str], *, seed: int) -> dict[str, Any]:
    """Plot the embeddings along their first two principal components, the classes of the queries marked."""
    points, shares = project(findings.embeddings)
    count = len(findings.rows)
    drawn = np.arange(count)
    if count > _PLANE:
        drawn = np.sort(np.random.default_rng(seed).choice(count, _PLANE, replace=False))
    names = [findings.rows[place].label for place in drawn.tolist()]
    marked = dict(zip(dict.fromkeys(queries), figures.MARKS, strict=False))
    first, second = (_percent(share, 1) for share in shares)
    axes = (f"first component ({first})", f"second component ({second})")
    return {
        "images": count,
        "drawn": len(drawn),
        "shares": (first, second),
        "marked": marked,
        "others": len(set(names) - set(marked)),
        "plot": figures.scatter(points[drawn], names, list(marked), axes=axes),
        "alt": f"{len(drawn)} images as points, {axes[0]} against {axes[1]}.",
    }


def tabulate_histograms(findings: Findings) -> dict[str, Any]:
    """Show the mean histogram of each class, or of classes evenly spaced by name."""
    means = class_histograms(findings.histograms, findings.labels, len(findings.classes))  # (C, m)
    classes, count = means.shape
    shown = np.unique(np.linspace(0, classes - 1, min(classes, _CLASSES)).round().astype(int)).tolist()
    largest = max(float(means[shown].max()), 1e-12)
    return {
        "count": count,
        "used": len(np.unique(means.argmax(axis=1))),
        "largest": largest,
        "classes": classes,
        "lines": [
            {"name": findings.classes[place], "strip": figures.strip(means[place] / largest),
             "strongest": _strongest(means[place], 3, 0)[0]}
            for place in shown
        ],
    }  # fmt: skip


def _maps(loaded: Run, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Show images beside themselves under the dominant prototypes of their places."""
    mapped, assignments = find_assignments(rows, loaded.embedder, loaded.recipe)
    pixels = figures.thumbnails(mapped, loaded.recipe, side=_MAP)
    made = []
    for row, found in zip(mapped, assignments, strict=True):
        shares = np.bincount(found.flatten()) / found.size
        told, rest = _strongest(shares, 4, 0)
        uri = figures.map_picture(pixels[row.key], found) if row.key in pixels else None
        summary = f"prototypes {told}{f' and {rest} more' if rest else ''}"
        made.append({"label": row.label, "key": row.key, "uri": uri, "summary": summary})
    return made


def _strongest(shares: NDArray[np.float64], most: int, digits: int) -> tuple[str, int]:
    """Name the prototypes of the largest shares, (m,), and count the others that have any."""
    order = [place for place in np.argsort(-shares, kind="stable").tolist() if shares[place] > 0]
    told = ", ".join(f"{place} ({_percent(shares[place], digits)})" for place in order[:most])
    return told, len(order[most:])


def describe_settings(recipe: Recipe) -> dict[str, list[tuple[str, object, str | None]]]:
    """Give name, value and description of the settings that differ from their defaults, and of the others."""
    found: dict[str, list[tuple[str, object, str | None]]] = {"changed": [], "others": []}
    for name, value in recipe.model_dump().items():
        field = Recipe.model_fields[name]
        changed = value != field.get_default(call_default_factory=True)
        found["changed" if changed else "others"].append((name, value, field.description))
    return found


def _told(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        value = ", ".join(f"{key}: {each}" for key, each in value.items())
    elif isinstance(value, list):
        value = ", ".join(map(str, value))
    return _clip("none" if value in (None, "") else str(value), 300)


def _percent(share: float, digits: int = 2) -> str:
    return f"{100 * share:.{digits}f}\u00a0%"


def _clip(text: str, most: int = 60) -> str:
    """Shorten a name; both its ends are told, since keys differ in their last characters."""
    return text if len(text) <= most else f"{text[: most // 2]}…{text[len(text) - (most - 1 - most // 2) :]}"


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
