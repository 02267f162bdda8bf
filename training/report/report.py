"""`crossbatch report`: one self-contained HTML page that shows a run and what it finds."""

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from pydantic import BaseModel, ConfigDict, Field

from serving.catalog.catalog import Format, Row
from serving.errors import BadSetting
from serving.look import POLICY, printable, stylesheet
from training.data.partition import Table, labelled, read_own
from training.data.pictures import tell_unreadable
from training.data.sampler import draw_sample
from training.evaluation.metrics import ProtocolName
from training.loop.checkpoint import write_file
from training.loop.logbook import History, dead_note, read_history
from training.loop.run import Run, load_run
from training.recipes.recipe import Recipe
from training.report import figures
from training.report.findings import (
    Findings,
    Ranking,
    choose_queries,
    embed_split,
    find_assignments,
    project,
    rank,
)

__all__ = ["Settings", "plot_curves", "render", "run"]

_THUMBNAIL, _MAP = 96, 160
"""Sides of a neighbour and of a mapped image, in pixels."""
_MAPS, _PLANE, _EPOCHS, _LINES = 12, 3000, 400, 60
"""Most prototype maps, points on the plane, epochs in a curve and in the table."""
_PANELS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("Loss and its parts", "loss",
     {"loss": "whole loss", "dml": "loss of embeddings (dml)", "xml": "cross-batch loss (xml)"}),
    ("On the validation classes", "percent", {"map_at_r": "MAP@R", "recall_at_1": "R@1"}),
    ("How many prototypes are at work", "prototypes",
     {"prototypes_in_use": "prototypes in use, of a batch",
      "prototypes_an_image": "prototypes in use, of an image",
      "eigenvalues": "eigenvalues above the ridge"}),
    ("Cosines of embeddings expressed by the other half", "cosine",
     {"expressed_cosine": "between images of different classes",
      "rebuilt_cosine": "to the embedding itself"}),
    ("How hard the cross-batch term pulls at the head", "percent",
     {"xml_gradient_share": "XML's gradient to that of the loss"}),
    ("Learning rate", "rate of the first group", {"learning_rate": "learning rate"}),
)  # fmt: skip
"""Which columns of metrics.csv share a frame, its title and unit, and what they are called."""


class Settings(BaseModel):
    """Show a run on one page that opens anywhere, from a mail too."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    run_dir: Path = Field(json_schema_extra={"positional": True, "metavar": "RUN"})
    """folder of the run"""
    out: Path | None = None
    """file to write; report.html in the run folder when not given"""
    data: Path | None = None
    """the images: a folder, .csv, .tar or .parquet file; the run's own when not given"""
    split: Literal["test", "train", "all"] = "test"
    """classes that training has not seen, those it has, or all, by the run's own rule"""
    format: Format = "auto"
    """layout of the data set; auto is the run's own, or finds out elsewhere"""
    table: Table = None
    protocol: ProtocolName = "auto"
    """who is searched among whom, as in evaluate"""
    queries: int = Field(9, ge=1, le=60)
    """how many queries are shown: best, typical and worst"""
    neighbours: int = Field(8, ge=1, le=30)
    """how many neighbours of each are shown"""
    images: int = Field(3000, ge=2, le=100_000)
    """most images embedded; of a larger split a sample is drawn"""
    seed: int = Field(0, ge=0, lt=2**31)
    """seed of the sample, and of the draw among equal queries"""
    batch: int = Field(64, ge=1, le=4096)
    """images embedded at a time"""


def run(settings: Settings) -> dict[str, Any]:
    """Embed the images of the split, or a sample of them, and write the page.

    Gives `page` (its path), `bytes`, `split`, `images` and `classes` shown, `of_images` of the whole split,
    `recall_at` by k as text, `map_at_r` and `r_precision` (all in 0..1), `queries`, `excluded`, `untrained`
    (the same figures of the backbone as training started it, or null), `unreadable` and `seconds`.
    """
    started = time.monotonic()
    loaded = load_run(settings.run_dir)
    recipe, record = loaded.recipe, loaded.record
    out = settings.out or settings.run_dir / "report.html"
    if out.is_dir():
        raise BadSetting(f"{out} is a folder: give --out a file, such as {out / 'report.html'}")
    if not out.parent.is_dir():
        raise BadSetting(f"the page cannot be written to {out}: there is no folder {out.parent}")
    history = read_history(settings.run_dir)
    catalog = read_own(record, data=settings.data, format=settings.format, table=settings.table)
    rows = labelled(catalog, settings.split, recipe.split)
    sample = draw_sample(rows, most=settings.images, seed=settings.seed)
    how = settings.model_dump(include={"batch", "split", "protocol"})
    findings = embed_split(sample, loaded.embedder, recipe, **how)
    measured, start = findings.measure(), findings.before()
    untrained = start.measure() if start else None
    on = figures.SPLITS[settings.split]
    page = _fill(
        path=settings.run_dir,
        record=record,
        on=on,
        day=datetime.now(UTC).strftime("%Y-%m-%d"),
        seed=settings.seed,
        measured=measured,
        whole=len(rows),
        bad=findings.unreadable,
        kept_start=loaded.epoch == 0,
        untrained=untrained,
        lacking=findings.lacking,
        sides={"query", "gallery"} <= {row.split for row in findings.rows},
        figures=figures.tabulate_figures(record, history, measured, untrained, title=f"{on}, now"),
        curves=plot_curves(history),
        dead=dead_note(history, recipe),
        **_show_pictures(findings, loaded, settings),
        histograms=figures.tabulate_histograms(findings),
        trained=recipe.learns_prototypes,
        settings=_describe_settings(recipe),
    )
    write_file(out, page)
    return {
        "page": str(out),
        "bytes": len(page),
        "split": settings.split,
        "of_images": len(rows),
        **measured,
        "untrained": untrained,
        "unreadable": [bad._asdict() for bad in findings.unreadable],
        "seconds": round(time.monotonic() - started, 1),
    }


def render(result: dict[str, Any]) -> str:
    """Tell where the page is, and its two first figures in percent."""
    sample = f" of {result['of_images']}" if result["images"] < result["of_images"] else ""
    before = result["untrained"]
    told = f" (untrained {100 * before['map_at_r']:.1f})" if before else ""
    wrote = (
        f"Wrote {result['page']} ({result['bytes'] / 1e6:.1f} MB) in {result['seconds']:.0f} s:"
        f" {result['images']}{sample} images of {result['classes']} classes ({result['split']}), MAP@R"
        f" {100 * result['map_at_r']:.1f}{told}, R@1 {100 * result['recall_at']['1']:.1f} (percent)."
    )
    return "\n".join([*tell_unreadable(result["unreadable"]), wrote])


def plot_curves(history: History) -> dict[str, Any]:
    """Plot every figure of the history, those that belong together in one frame, and tabulate them."""
    drawn, few = _thin(history, _EPOCHS), _thin(history, _LINES)
    known = {name: label for _, _, labels in _PANELS for name, label in labels.items()}
    labels = {name: known.get(name, name.replace("_", " ")) for name in _names(history)}
    others = [
        (label.capitalize(), label, {name: label})
        for name, label in labels.items()
        if name not in known and name != "steps"
    ]
    charts = []
    for title, unit, lines in (*_PANELS, *others):
        factor = 100 if unit == "percent" else 1
        series = {
            label: [(row["epoch"], factor * row[name]) for row in drawn if name in row]
            for name, label in lines.items()
        }
        # a term without weight is all zeros: no line
        series = {label: points for label, points in series.items() if any(y for _, y in points)}
        if series:
            told = " ".join(f"{name}: {_tell(points)}." for name, points in series.items())
            plot, told = figures.line_chart(series, unit=unit), f"{title} by epoch. {told}"
            charts.append({"title": title, "plot": plot, "alt": told})
    names = _names(few)
    rows = [[f"{row['epoch']:g}", *(f"{row[name]:.4g}" if name in row else "–" for name in names)]
            for row in few]  # fmt: skip
    return {
        "charts": charts,
        "epochs": len(history),
        "drawn": len(drawn),
        "names": ["epoch", *(labels[name] for name in names)],
        "rows": rows,
    }


def _thin(history: History, most: int) -> History:
    """Give at most `most` of the epochs, evenly spaced, the first and the last among them."""
    if len(history) <= most:
        return history
    places = {round(i * (len(history) - 1) / (most - 1)) for i in range(most)}
    return [history[place] for place in sorted(places)]


def _names(history: History) -> list[str]:
    return [name for name in dict.fromkeys(chain.from_iterable(history)) if name != "epoch"]


def _tell(points: Sequence[tuple[float, float]]) -> str:
    """Say a line in words, for whoever does not see it."""
    (first, begin), (last, end) = points[0], points[-1]
    if first == last:
        return f"{begin:.4g} at epoch {first:g}"
    return f"from {begin:.4g} at epoch {first:g} to {end:.4g} at epoch {last:g}"


def _show_pictures(findings: Findings, loaded: Run, settings: Settings) -> dict[str, Any]:
    """Make what shows images: the grids of queries and what they find, the plane and the maps."""
    ranking, start = rank(findings, neighbours=settings.neighbours), findings.before()
    before = rank(start, neighbours=settings.neighbours) if start else None  # of the same queries
    labels, seed = findings.labels[ranking.queries], settings.seed
    chosen = choose_queries(ranking.precision, labels, count=settings.queries, seed=seed)
    places = list(chain.from_iterable(chosen.values()))
    asked = [findings.rows[row] for row in ranking.queries[places].tolist()]
    found = [each.nearest[places].flatten().tolist() for each in (ranking, before) if each]
    near = [findings.rows[row] for row in chain.from_iterable(found)]
    shown = list({row.key: row for row in [*asked, *near]}.values())
    thumbnails = figures.thumbnails(shown, loaded.recipe, side=_THUMBNAIL)
    uris = {key: figures.jpeg(pixels) for key, pixels in thumbnails.items()}

    def show(row: Row) -> dict[str, Any]:
        return {"label": row.label, "key": row.key, "uri": uris.get(row.key)}

    def found_by(which: Ranking, place: int) -> dict[str, Any]:
        found = [show(findings.rows[row]) for row in which.nearest[place].tolist()]
        own = findings.rows[which.queries[place]].label
        for each, score in zip(found, which.similarity[place].tolist(), strict=True):
            each |= {"score": score, "verdict": "right" if each["label"] == own else "wrong"}
        return {"precision": which.precision[place], "found": found}

    def grid(place: int) -> dict[str, Any]:
        query = show(findings.rows[ranking.queries[place]]) | found_by(ranking, place)
        return query | {"before": found_by(before, place) if before else None}

    count = min(len(asked), _MAPS)  # evenly, so that best, typical and worst are among them
    spread = [asked[place * len(asked) // count] for place in range(count)]
    return {
        "asked": len(ranking.queries),
        "changed": _tell_changes(ranking, before) if before else None,
        "grids": {kind: [grid(place) for place in found] for kind, found in chosen.items()},
        "plane": _plane(findings, [row.label for row in asked], seed=seed),
        "maps": _maps(loaded, spread),
        "grid": loaded.embedder.grid,
        "numbered": loaded.embedder.grid[1] <= figures.NUMBERED,
    }


def _tell_changes(ranking: Ranking, before: Ranking) -> dict[str, float]:
    """Give the shares of queries whose average precision rose and fell by training, rounding apart."""
    change = ranking.precision - before.precision
    return {"rose": float(np.mean(change > 1e-9)), "fell": float(np.mean(change < -1e-9))}


def _plane(findings: Findings, queries: Sequence[str], *, seed: int) -> dict[str, Any]:
    """Plot the embeddings along their first two principal components, the classes of the queries marked."""
    points, shares = project(findings.embeddings)
    count = len(findings.rows)
    drawn = np.arange(count)
    if count > _PLANE:
        drawn = np.sort(np.random.default_rng(seed).choice(count, _PLANE, replace=False))
    names = [findings.rows[place].label for place in drawn.tolist()]
    marked = dict(zip(dict.fromkeys(queries), figures.MARKS, strict=False))
    first, second = (figures.percent(share, 1) for share in shares)
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


def _maps(loaded: Run, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Show images beside themselves under the dominant prototypes of their places."""
    mapped, assignments = find_assignments(rows, loaded.embedder, loaded.recipe)
    pixels = figures.thumbnails(mapped, loaded.recipe, side=_MAP)
    made = []
    for row, found in zip(mapped, assignments, strict=True):
        told, rest = figures.strongest(np.bincount(found.flatten()) / found.size, 4)
        uri = figures.map_picture(pixels[row.key], found)
        made.append({"label": row.label, "key": row.key, "uri": uri, "strongest": told, "rest": rest})
    return made


def _describe_settings(recipe: Recipe) -> dict[str, list[tuple[str, object, str | None]]]:
    """Give name, value and description of the settings that differ from their defaults, and of the others."""
    found: dict[str, list[tuple[str, object, str | None]]] = {"changed": [], "others": []}
    for name, value in recipe:
        field = Recipe.model_fields[name]
        found["others" if value == field.default else "changed"].append((name, value, field.description))
    return found


def _fill(**shown: Any) -> bytes:
    """Fill the template; all text is printable and escaped."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    environment.filters |= {"clip": figures.clip, "percent": figures.percent, "told": _told}
    style = stylesheet() + Path(__file__).with_name("style.css").read_text(encoding="utf-8")
    return environment.get_template("page.html").render(shown, policy=POLICY, style=style).encode("utf-8")


def _told(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        value = ", ".join(f"{key}: {each}" for key, each in value.items())
    elif isinstance(value, list):
        value = ", ".join(map(str, value))
    return figures.clip("none" if value in (None, "") else str(value), 300)
