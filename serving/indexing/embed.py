"""The command `crossbatch embed`: the images of a data set as a vector file, without a gallery."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import Field

from serving.catalog.catalog import tell_unread
from serving.errors import BadData
from serving.gallery.vectors import Maker, vectors_written
from serving.indexing.command import Reading, some
from serving.indexing.pipeline import Skipped, embed_rows
from serving.model.trial import load_encoder

__all__ = ["Settings", "render", "run"]


class Settings(Reading):
    """Settings of `crossbatch embed`."""

    data: Path = Field(json_schema_extra={"positional": True, "metavar": "FOLDER"})
    """the data set: a folder, or one .csv, .tar or .parquet file"""
    out: Path
    """the parquet file to write: key, label, uri, metadata and vector of each image"""


def run(settings: Settings) -> dict[str, Any]:
    """Embed a data set; gives how many of its `images` were `stored`, and which were `skipped`, and why."""
    catalog = settings.catalog()
    encoder = load_encoder(settings.model, threads=settings.threads, provider=settings.provider)
    began = time.monotonic()
    count, skipped = 0, list[Skipped]()
    with vectors_written(settings.out, Maker.model_validate(encoder.spec, from_attributes=True)) as put:
        for each in embed_rows(encoder, catalog, batch=settings.batch, threads=settings.threads):
            if isinstance(each, Skipped):
                skipped.append(each)
            else:
                put([each])
                count += 1
        if not count:
            raise BadData(
                f"none of the {len(catalog.rows)} images of {settings.data} can be embedded; the first,"
                f" {skipped[0].key}: {skipped[0].reason}"
            )
    seconds = time.monotonic() - began
    absent = [Skipped(path, path, "the data set names it, and it is not there") for path in catalog.missing]
    return {
        "out": str(settings.out),
        "model": encoder.spec.name,
        "provider": encoder.provider,
        "root": str(catalog.root),
        "format": catalog.format,
        "images": len(catalog.rows) + len(absent),
        "stored": count,
        "passed_over": dict(catalog.passed_over),
        "left_out": dict(catalog.left_out),
        "notes": [*catalog.notes, *catalog.texts],
        "skipped": [asdict(each) for each in skipped + absent],
        "seconds": round(seconds, 3),
        "images_per_second": round(count / seconds, 1),
    }


def render(result: dict[str, Any]) -> str:
    """Return what a person reads."""
    first = (
        f"{result['out']}: {result['stored']} of {result['images']} images in {result['seconds']:.1f} s"
        f" ({result['images_per_second']:.0f} a second), by the model {result['model']}"
    )
    skipped = [f"{each['path']}: {each['reason']}" for each in result["skipped"]]
    unread = tell_unread(result["passed_over"], result["left_out"])
    return "\n".join([first, *unread, *result["notes"], *some("skipped", skipped, "--json lists all")])
