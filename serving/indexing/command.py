"""The command `crossbatch index`: brings a gallery in step with a data set, as far as was asked for.

An item's key is its row's, so a second run finds what is done and goes on from there; what is in the gallery
besides stays. An item's URI is its image's path from the data set's root: a gallery's readers learn nothing
of the machine that filled it.
"""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from serving.catalog.catalog import Format, Split, read, select, select_missing
from serving.errors import BadData, BadSetting
from serving.gallery.directory import GalleryDirectory, check_name
from serving.gallery.gallery import Gallery, RebuildPolicy
from serving.indexing.pipeline import index_rows
from serving.indexing.report import FILE_NAME, Skipped, check_report, write_report
from serving.indexing.target import Target
from serving.model.encoder import Encoder
from serving.progress import stages

__all__ = ["Settings", "render", "run"]

_SHOWN = 5


class Settings(BaseModel):
    """Settings of `crossbatch index`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    gallery: str = Field(
        description="the gallery to fill, made if it is not there: a path (galleries/birds, ./birds), "
        "or a name if --galleries is given",
        json_schema_extra={"positional": True},
    )
    model: Path = Field(description="the model file, as `crossbatch export` writes it")
    data: Path = Field(
        description="the data set: a folder; a .csv table beside its images; or one .tar or .parquet file"
    )
    galleries: Path | None = Field(default=None, description="the folder that holds the gallery")
    format: Format = Field(default="auto", description="how the data set is laid out; auto finds out")
    split: Split = Field(
        default="all",
        description="which images: all, or one side of the split that the model was trained with; query and "
        "gallery are those of the test side that the data set calls so",
    )
    sync: bool = Field(
        default=False,
        description="embed images anew whose file has changed, and delete items of this data set whose image "
        "is gone; otherwise both are counted and left as they are",
    )
    report: Path | None = Field(
        default=None,
        description=f"the CSV file that lists images which cannot be stored, with the reason; {FILE_NAME} in "
        "the gallery's folder by default, and no file where there are none",
    )
    thumbnails: bool = Field(
        default=False, description="keep a small JPEG picture with each item; decided when a gallery is made"
    )
    index: str | None = Field(
        default=None,
        description="type of the search index: auto (by the number of items and the recall), exact, or a "
        "FAISS factory string (IVF1024,PQ32x4fs); by default as it is, and auto for a new gallery",
    )
    recall: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="recall@10 that an automatic index must reach; by default as it is, and 0.99 for a new "
        "gallery",
    )
    batch: int = Field(default=32, ge=1, le=1024, description="images encoded at once")
    threads: int = Field(default=0, ge=0, le=256, description="threads that decode and encode; 0: one a core")
    device: Literal["cpu", "cuda"] = Field(default="cpu", description="where the model runs")


def run(settings: Settings) -> dict[str, Any]:
    """Index a data set.

    Returns:
        The fields of `Report` and `gallery`, `model`, `root` (below which the items' URIs are paths),
        `format`, `table`, `labels`, `images` found on the wanted side of the split, `unlabelled` (images of
        no class that the split left out), `empty` class folders, `report` (the file that lists the skipped,
        None where there are none), `items` now in the gallery, `seconds`, `images_per_second`.

    Raises:
        CrossbatchError: The data set cannot be read, or none of its images can; settings do not go together
            or with the gallery that is there; the model or gallery is damaged, or cannot be written.
    """
    folder, name = _place(settings)
    if settings.report is not None:
        check_report(settings.report)
    catalog = read(settings.data, settings.format)
    encoder = Encoder(settings.model, threads=settings.threads, device=settings.device)
    split, rule = settings.split, encoder.spec.split
    rows = select(catalog, split, rule)
    began = time.monotonic()
    # The index is made once, at the end; rebuilding it on the way would only take time from the encoder.
    with GalleryDirectory(folder, policy=RebuildPolicy(automatic=False)) as directory:
        wanted: dict[str, Any] = {"index": settings.index, "recall": settings.recall}
        target = Target(directory, name, encoder.spec, thumbnails=settings.thumbnails, **wanted)
        more: dict[str, Any] = settings.model_dump(include={"split", "sync", "batch", "threads"})
        report = index_rows(encoder, catalog, rows, target, **more)
        gone = "the data set names it, and it is not there"
        absent = [Skipped(path, path, gone) for path in select_missing(catalog, split, rule)]
        file = settings.report or folder / name / FILE_NAME
        if file.parent.is_dir():
            write_report(file, report.skipped + absent)
        if len(report.skipped) == len(rows):
            first = report.skipped[0]
            raise BadData(
                f"none of the {len(rows)} images of {settings.data} can be indexed; "
                f"the first, {first.key}: {first.reason}"
            )
        items = _finished(target.made(), settings)
    seconds = time.monotonic() - began
    return {
        "gallery": str(folder / name),
        "model": encoder.spec.name,
        "root": str(catalog.root),
        "format": catalog.format,
        "table": None if catalog.table is None else str(catalog.table),
        "labels": len({row.label for row in rows} - {""}),
        "images": len(rows) + len(absent),
        **asdict(report),
        "skipped": [asdict(each) for each in report.skipped + absent],
        "unlabelled": catalog.unlabelled if split != "all" else 0,
        "empty": list(catalog.empty),
        "report": str(file) if report.skipped or absent else None,
        "items": items,
        "seconds": round(seconds, 3),
        "images_per_second": round(report.stored / seconds, 1),
    }


def render(result: dict[str, Any]) -> str:
    """Return what a person reads."""
    lines = [
        f"read {result['table'] or result['root']} as {result['format']}: {result['images']} images, "
        f"{result['labels']} labels",
        f"{result['gallery']}: stored {result['stored']} of {result['images']} images in "
        f"{result['seconds']:.1f} s ({result['images_per_second']:.0f} a second); "
        f"it holds {result['items']} items",
    ]
    for field, text in (
        ("unchanged", "unchanged: {} images, which were not embedded again"),
        ("updated", "updated: {} items whose label, URI or metadata was another"),
        ("deleted", "deleted: {} items whose image is gone"),
        ("changed", "changed: {} images, whose items were left as they are; --sync updates them"),
        ("gone", "gone: the images of {} items, which were left as they are; --sync deletes them"),
        ("kept", "kept: items of an earlier run of {} images that are skipped now"),
        ("unlabelled", "left out: {} images of no class, which are on no side of the split"),
    ):
        if result[field]:
            lines.append(text.format(result[field]))
    skipped = [f"{each['key']}: {each['reason']}" for each in result["skipped"]]
    more = f"{result['report']} and --json list all"
    empty = result["empty"]
    for title, entries, all_of_them in (
        ("skipped", skipped, more), ("folders without an image", empty, "--json lists all")
    ):  # fmt: skip
        if entries:
            lines.append(f"{title}: {len(entries)}")
            lines += [f"  {entry}" for entry in entries[:_SHOWN]]
        if len(entries) > _SHOWN:
            lines.append(f"  and {len(entries) - _SHOWN} more ({all_of_them})")
    return "\n".join(lines)


def _finished(gallery: Gallery, settings: Settings) -> int:
    """Make the index, where something has changed since it was made; returns how many items there are."""
    info = gallery.info()
    wanted = (info.wanted_index, info.wanted_recall)
    other = (settings.index or info.wanted_index, settings.recall or info.wanted_recall) != wanted
    if info.fresh or info.deleted or other:
        with stages("item") as advance:
            gallery.rebuild(index=settings.index, recall=settings.recall, whole=False, progress=advance)
    return info.items


def _place(settings: Settings) -> tuple[Path, str]:
    """Return the folder of galleries and the name of the one to fill."""
    name = settings.gallery
    if settings.galleries is None:
        if "/" not in name:
            raise BadSetting(
                f"{name} alone may be a folder here or a gallery elsewhere; give ./{name}, "
                f"or {name} and the folder that holds it by --galleries"
            )
        return Path(name).parent, check_name(Path(name).name)
    if "/" in name:
        raise BadSetting(f"with --galleries, give the gallery's name alone; {name} is a path")
    return settings.galleries, check_name(name)
