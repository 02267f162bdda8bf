"""`crossbatch report`: one self-contained HTML page that shows a run and what it finds."""

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from serving.catalog.catalog import Format, Row, select
from serving.errors import BadData, BadSetting
from training.data.partition import check_complete, read_own
from training.data.pictures import tell_unreadable
from training.data.sampler import draw_sample
from training.evaluation.ranking import choose_queries, rank
from training.loop.logbook import read_history
from training.loop.run import Run, load_run
from training.loop.whole_file import write_file
from training.method.cross_batch import dead_note
from training.report.about import about_section
from training.report.curves import curves_section
from training.report.document import Section, document
from training.report.figures import figures_section, key_figures
from training.report.findings import Findings, embed_split, find_assignments, measure
from training.report.grids import THUMBNAIL, grids_section
from training.report.histograms import histograms_section
from training.report.maps import MAP, maps_section
from training.report.markup import element
from training.report.picture import thumbnails
from training.report.plane import plane_section

__all__ = ["Settings", "render", "run"]

_MAPS = 12
"""Most prototype maps."""
_SPLITS = {"test": "unseen classes (test)", "train": "training classes", "all": "all classes"}


class Settings(BaseModel):
    """Show a run on one page that opens anywhere, from a mail too."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run_dir: Path = Field(
        description="folder of the run", json_schema_extra={"positional": True, "metavar": "RUN"}
    )
    out: Path | None = Field(None, description="file to write; report.html in the run folder when not given")
    data: Path | None = Field(
        None, description="the images: a folder, .csv, .tar or .parquet file; the run's own when not given"
    )
    split: Literal["test", "train", "all"] = Field(
        "test", description="classes that training has not seen, those it has, or all, by the run's own rule"
    )
    format: Format = Field(
        "auto", description="layout of the data set; auto is the run's own, or finds out elsewhere"
    )
    table: Path | None = Field(
        None, description="the .csv, .tar or .parquet file to read, where there are several"
    )
    queries: int = Field(9, ge=1, le=60, description="how many queries are shown: best, typical and worst")
    neighbours: int = Field(8, ge=1, le=30, description="how many neighbours of each are shown")
    images: int = Field(
        3000, ge=2, le=100_000, description="most images embedded; of a larger split a sample is drawn"
    )
    seed: int = Field(
        0, ge=0, lt=2**31, description="seed of the sample, and of the draw among equal queries"
    )
    batch: int = Field(64, ge=1, le=4096, description="images embedded at a time")


def run(settings: Settings) -> dict[str, Any]:
    """Embed the images of the split, or a sample of them, and write the page.

    Returns:
        `page` (its path), `bytes`, `split`, `images` and `classes` shown, `of_images` of the whole split,
        `recall_at` by k as text, `map_at_r` and `r_precision` (all in 0..1), `queries`, `excluded`,
        `unreadable` and `seconds`.

    Raises:
        CrossbatchError: If the run or data set cannot be read, no image has a match, or the page cannot be
            written.
    """
    started = time.monotonic()
    loaded = load_run(settings.run_dir)
    out = settings.out or settings.run_dir / "report.html"
    _check_place(out)
    history = read_history(settings.run_dir)
    catalog = read_own(loaded.record, data=settings.data, format=settings.format, table=settings.table)
    check_complete(catalog)
    rows = [row for row in select(catalog, settings.split, loaded.recipe.split) if row.label]
    if not rows:
        raise BadData(f"none of the {len(catalog.rows)} images of {catalog.root} is of a class")
    findings = embed_split(
        draw_sample(rows, most=settings.images, seed=settings.seed),
        loaded.embedder,
        loaded.recipe,
        batch=settings.batch,
        split=settings.split,
    )
    measured = measure(findings)
    note = _note(settings, findings, measured, whole=len(rows))
    if loaded.epoch == 0:
        note += " These weights are untrained: on validation, no epoch did better than the start."
    sections = [
        figures_section(loaded.record, history, measured, title=f"{_SPLITS[settings.split]}, now", note=note),
        curves_section(
            history,
            validated=bool(loaded.record["data"].get("validation_classes")),
            note=dead_note(history.rows, loaded.recipe),
        ),
        *_pictures(settings, loaded, findings),
        about_section(settings.run_dir, loaded.recipe, loaded.record),
    ]
    day = datetime.now(UTC).strftime("%Y-%m-%d")
    page = document(
        loaded.record["name"],
        [
            element("p", f"How well images of {_SPLITS[settings.split]} find each other.", class_="soft"),
            key_figures(measured),
        ],
        sections,
        foot=f"Made by crossbatch report on {day}.",
    )
    write_file(out, page)
    return {
        "page": str(out),
        "bytes": len(page),
        "split": settings.split,
        "of_images": len(rows),
        **measured,
        "unreadable": [{"key": bad.key, "reason": bad.reason} for bad in findings.unreadable],
        "seconds": round(time.monotonic() - started, 1),
    }


def render(result: dict[str, Any]) -> str:
    """Tell where the page is, and its two first figures in percent."""
    sample = f" of {result['of_images']}" if result["images"] < result["of_images"] else ""
    return "\n".join(
        [
            *tell_unreadable(result["unreadable"]),
            f"Wrote {result['page']} ({result['bytes'] / 1e6:.1f} MB) in {result['seconds']:.0f} s:"
            f" {result['images']}{sample} images of {result['classes']} classes ({result['split']}), MAP@R"
            f" {100 * result['map_at_r']:.1f}, R@1 {100 * result['recall_at']['1']:.1f} (percent).",
        ]
    )


def _check_place(out: Path) -> None:
    """Refuse a place that cannot be written to before the work is done."""
    if out.is_dir():
        raise BadSetting(f"{out} is a folder: give --out a file, such as {out / 'report.html'}")
    if not out.parent.is_dir():
        raise BadSetting(f"the page cannot be written to {out}: there is no folder {out.parent}")


def _note(settings: Settings, findings: Findings, measured: dict[str, Any], *, whole: int) -> str:
    """Say of what the figures are."""
    left = len(findings.unreadable)
    told = [f"{len(findings.rows):,} images of {len(findings.classes):,} classes were embedded"]
    if whole > len(findings.rows) + left:
        told[0] += (
            f", a sample of {whole:,} drawn class by class (seed {settings.seed}): among fewer images more is"
            " found, so that its figures are higher than those of the whole"
        )
    if left:
        first = findings.unreadable[0]
        told.append(f"{left:,} could not be read and were left out (first: {first.key}: {first.reason})")
    if measured["excluded"]:
        why = "have no match in the gallery" if "query" in findings.roles else "are alone in their class"
        told.append(f"{measured['excluded']:,} {why} and were not asked for")
    return f"{'; '.join(told)}."


def _pictures(settings: Settings, loaded: Run, findings: Findings) -> list[Section]:
    """Make the sections that show images: grids, plane, histograms and maps."""
    ranking = rank(findings.embeddings, findings.labels, findings.roles, neighbours=settings.neighbours)
    chosen = choose_queries(
        ranking.precision, findings.labels[ranking.queries], count=settings.queries, seed=settings.seed
    )
    places = list(chain.from_iterable(chosen.values()))
    queries = [findings.rows[row] for row in ranking.queries[places].tolist()]
    shown = _distinct([*queries, *(findings.rows[row] for row in ranking.nearest[places].flatten().tolist())])
    trained = loaded.recipe.learns_prototypes
    mapped, assignments = find_assignments(_spread(queries), loaded.embedder, loaded.recipe)
    return [
        grids_section(
            findings.rows,
            ranking,
            chosen,
            thumbnails(shown, loaded.recipe, side=THUMBNAIL),
            seed=settings.seed,
        ),
        plane_section(findings, [row.label for row in queries], seed=settings.seed),
        histograms_section(findings.histograms, findings.labels, findings.classes, trained=trained),
        maps_section(
            mapped,
            assignments,
            loaded.embedder.grid,
            thumbnails(mapped, loaded.recipe, side=MAP),
        ),
    ]


def _spread(queries: Sequence[Row]) -> list[Row]:
    """Take as many of the queries as are mapped, evenly, so that best, typical and worst are among them."""
    count = min(len(queries), _MAPS)
    return [queries[place * len(queries) // count] for place in range(count)]


def _distinct(rows: Sequence[Row]) -> list[Row]:
    return list({row.key: row for row in rows}.values())
