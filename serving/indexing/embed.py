"""The command `crossbatch embed`: the images of a data set as a vector file, without a gallery."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field

from serving.catalog.catalog import Format, read, tell_unread
from serving.errors import BadData
from serving.gallery.item import GalleryItem
from serving.gallery.vectors import Maker, vectors_written
from serving.indexing.command import some
from serving.indexing.pipeline import Skipped, index_rows
from serving.indexing.target import Target
from serving.model.encoder import Encoder

__all__ = ["Settings", "render", "run"]


class Settings(BaseModel):
    """Settings of `crossbatch embed`."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    data: Path = Field(json_schema_extra={"positional": True, "metavar": "FOLDER"})
    """the data set: a folder, or one .csv, .tar or .parquet file"""
    model: Path
    """the model file, as `crossbatch export` writes it"""
    out: Path
    """the parquet file to write: key, label, uri, metadata and vector of each image"""
    format: Format = "auto"
    """how the data set is laid out; auto finds out"""
    exclude: list[str] = []
    """pattern of files or folders to leave out, by the ends of their paths (*_back.jpg, shoes/old); may be
    repeated"""
    decimal: Literal[".", ","] = "."
    """what stands before the decimals of a number in a table of text"""
    batch: int = Field(32, ge=1, le=1024)
    """images encoded at once"""
    threads: int = Field(0, ge=0, le=256)
    """threads that decode and encode; 0: one a core"""
    device: Literal["cpu", "cuda"] = "cpu"
    """where the model runs"""


def run(settings: Settings) -> dict[str, Any]:
    """Embed a data set; gives how many of its `images` were `stored`, and which were `skipped`, and why."""
    catalog = read(settings.data, settings.format, exclude=settings.exclude, decimal=settings.decimal)
    encoder = Encoder(settings.model, threads=settings.threads, device=settings.device)
    began = time.monotonic()
    with vectors_written(settings.out, Maker.model_validate(encoder.spec, from_attributes=True)) as put:
        target = cast(Target, _File(put))
        report = index_rows(
            encoder, catalog, catalog.rows, target, batch=settings.batch, threads=settings.threads
        )
        if not report.stored:
            raise BadData(
                f"none of the {len(catalog.rows)} images of {settings.data} can be embedded; the first,"
                f" {report.skipped[0].key}: {report.skipped[0].reason}"
            )
    seconds = time.monotonic() - began
    absent = [Skipped(path, path, "the data set names it, and it is not there") for path in catalog.missing]
    return {
        "out": str(settings.out),
        "model": encoder.spec.name,
        "root": str(catalog.root),
        "format": catalog.format,
        "images": len(catalog.rows) + len(absent),
        "stored": report.stored,
        "passed_over": dict(catalog.passed_over),
        "left_out": dict(catalog.left_out),
        "notes": list(catalog.notes),
        "skipped": [asdict(each) for each in report.skipped + absent],
        "seconds": round(seconds, 3),
        "images_per_second": round(report.stored / seconds, 1),
    }


def render(result: dict[str, Any]) -> str:
    """Return what a person reads."""
    first = (
        f"{result['out']}: {result['stored']} of {result['images']} images in {result['seconds']:.1f} s"
        f" ({result['images_per_second']:.0f} a second), by the model {result['model']}"
    )
    skipped = [f"{each['key']}: {each['reason']}" for each in result["skipped"]]
    unread = tell_unread(result["passed_over"], result["left_out"])
    return "\n".join([first, *unread, *result["notes"], *some("skipped", skipped, "--json lists all")])


class _File:
    """A vector file where indexing has a gallery: a new one, which is given each item once."""

    gallery, thumbnail_side = None, 0

    def __init__(self, put: Callable[[Iterable[GalleryItem]], None]) -> None:
        self._put = put

    def made(self) -> "_File":
        return self

    def upsert(self, items: Sequence[GalleryItem], *, expected: object) -> None:
        self._put(items)
