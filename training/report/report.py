"""`crossbatch report`: one self-contained HTML page that shows a run and what it finds."""

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from serving.catalog.catalog import Format, select
from serving.errors import BadData, BadSetting
from training.data.partition import check_complete, read_own
from training.data.pictures import tell_unreadable
from training.data.sampler import draw_sample
from training.loop.checkpoint import write_file
from training.loop.logbook import read_history
from training.loop.run import load_run
from training.method.cross_batch import dead_note
from training.report.contents import (
    SPLITS,
    describe_settings,
    plot_curves,
    render_page,
    show_pictures,
    tabulate_figures,
    tabulate_histograms,
)
from training.report.findings import embed_split, measure

__all__ = ["Settings", "render", "run"]


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
    on = SPLITS[settings.split]
    page = render_page(
        title=loaded.record["name"],
        path=settings.run_dir,
        own=loaded.record["data"],
        record=loaded.record,
        on=on,
        day=datetime.now(UTC).strftime("%Y-%m-%d"),
        seed=settings.seed,
        measured=measured,
        whole=len(rows),
        findings=findings,
        untrained=loaded.epoch == 0,
        figures=tabulate_figures(loaded.record, history, measured, title=f"{on}, now"),
        curves=plot_curves(history),
        dead=dead_note(history.rows, loaded.recipe),
        **show_pictures(
            findings, loaded, queries=settings.queries, neighbours=settings.neighbours, seed=settings.seed
        ),
        histograms=tabulate_histograms(findings),
        trained=loaded.recipe.learns_prototypes,
        settings=describe_settings(loaded.recipe),
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
