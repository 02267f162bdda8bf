"""The command `crossbatch index`: brings a gallery in step with a data set, as far as was asked for.

An item's key is its row's. Its URI is its image's path from the data set's root: a gallery's readers learn
nothing of the machine that filled it.
"""

import csv
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any, Final, Literal, cast

from pydantic import BaseModel, ConfigDict, Field

from serving.catalog.catalog import Catalog, Format, Split, read, select, select_missing, tell_unread
from serving.errors import BadData, BadSetting, Unsupported, cause_of
from serving.gallery.address import Place, placed
from serving.gallery.directory import check_name
from serving.gallery.disk import disk_error, written_aside
from serving.gallery.gallery import Gallery, RebuildPolicy
from serving.gallery.map import make_map
from serving.gallery.place import galleries_at, kinds_by_field
from serving.indexing.pipeline import Skipped, index_rows
from serving.indexing.ray_engine import RayEngine
from serving.indexing.target import Target
from serving.model.provider import GPUS, Provider, ProviderChoice
from serving.model.trial import load_encoder
from serving.progress import stages

__all__ = ["Reading", "Settings", "complaint", "render", "run", "some"]

FILE_NAME = "skipped.csv"
_HEADER = "key,path,reason"
_SHOWN = 5
_OF_RAY: Final = frozenset({"ray_address", "decoders", "encoders", "shards", "shard_images", "patience"})
_IN_FOLDERS: Final = {"index": (None, "auto"), "map": ("none",), "recall": (None,), "thumbnails": (False,)}
"""Flags that a Milvus takes with these values alone."""


class Reading(BaseModel):
    """The settings of each command that embeds a data set."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    model: Path
    """the model file, as `crossbatch export` writes it"""
    data: Path
    """the data set: a folder, or one .csv, .tar or .parquet file"""
    format: Format = "auto"
    """how the data set is laid out; auto finds out"""
    exclude: list[str] = []
    """pattern of files or folders to leave out, by the ends of their paths (*_back.jpg, shoes/old); may be
    repeated"""
    decimal: Literal[".", ","] = "."
    """what stands before the decimals of a number in a table of text"""
    text: list[str] = []
    """field of the metadata that is text whatever it holds, as article numbers are; may be repeated"""
    batch: int = Field(32, ge=1, le=1024)
    """images encoded at once"""
    threads: int = Field(0, ge=0, le=256)
    """threads that decode and encode; 0: one a core"""
    provider: ProviderChoice = "cpu"
    """what runs the model; must then be there; auto: the fastest that gives the CPU's embeddings to 1e-4"""

    def catalog(self) -> Catalog:
        """Read the data set."""
        return read(self.data, self.format, exclude=self.exclude, decimal=self.decimal, text=self.text)


class Settings(Reading):
    """Settings of `crossbatch index`."""

    gallery: str = Field(json_schema_extra={"positional": True})
    """the gallery to fill, made if it is not there: its name in --galleries, a path, or
    milvus://HOST:19530/NAME"""
    galleries: Place = Path("galleries")
    """the folder that holds the gallery, or a Milvus as milvus://HOST:19530, where it is given by its name"""
    split: Split = "all"
    """which images: all, or one side of the split that the model trained with"""
    sync: bool = False
    """embed changed images anew, and delete items of this data set whose image is gone"""
    report: Path | None = None
    """CSV file of what cannot be stored; by default skipped.csv in the gallery, and none for a Milvus"""
    thumbnails: bool = False
    """keep a small JPEG picture with each item; decided when a gallery is made"""
    index: str | None = None
    """search index: auto (by the number of items and the recall), exact, or a FAISS factory string
    (IVF1024,PQ32x4fs); by default as it is, and auto for a new gallery"""
    recall: float | None = Field(None, gt=0, le=1)
    """recall@10 that an auto index must reach; 0.99 for a new gallery"""
    map: Literal["none", "pca", "umap"] = "none"
    """give each item a place on a map, as `gallery map` does, before the index is made"""
    fail_above: float | None = Field(None, ge=-1, le=1)
    """store all, and end with status 2 where two items of the gallery score this or more, as duplicates do"""
    engine: Literal["plain", "ray"] = "plain"
    """what reads and embeds: this process, or Ray, on this machine or on a cluster"""
    ray_address: str = "local"
    """of the cluster, HOST:PORT, or auto where this machine is one of it; local: Ray on this machine alone"""
    decoders: int = Field(0, ge=0, le=100_000)
    """images that Ray decodes at once, each on a core; 0: one on each core"""
    encoders: int = Field(0, ge=0, le=10_000)
    """processes of Ray that hold the model; 0: one a machine, or one a GPU"""
    shards: Path | None = None
    """folder for what Ray has finished, seen by all machines, and kept; by default beside the gallery (of a
    Milvus: here), and removed at the end"""
    shard_images: int = Field(256, ge=1, le=65_536)
    """images that Ray takes as one piece of work, rounded up to whole batches"""
    patience: float = Field(900.0, gt=0)
    """seconds in which Ray must finish a piece of work; else the run ends"""


def run(settings: Settings) -> dict[str, Any]:
    """Index a data set.

    Returns:
        The fields of `Report` and `gallery`, `model`, `provider` (what ran it), `root` (below which items'
        URIs are paths), `format`, `table`, `labels`, `images` found on the wanted side of the split,
        `unlabelled` (images of no class that the split left out), `passed_over` and `left_out` (how many
        files, by the ends of their names, and folders), `notes` (what else was not read, fields that are text
        because of one value, and those of another kind than before), `empty` class folders, `report` (the
        file that lists the skipped, None where there are none), `items` now in the gallery, `seconds`,
        `images_per_second`.
    """
    place, name = _place(settings)
    for flag, usual in _IN_FOLDERS.items() if isinstance(place, str) else ():
        if getattr(settings, flag) not in usual:
            raise Unsupported(f"--{flag} is for galleries in a folder; leave it out for a Milvus")
    if settings.report is not None:
        _check_report(settings.report)
    if settings.engine == "plain" and (given := _OF_RAY & settings.model_fields_set):
        raise BadSetting(f"--{min(given).replace('_', '-')} is for --engine ray; give both, or neither")
    catalog = settings.catalog()
    far = settings.engine == "ray" and settings.provider in GPUS  # a GPU is not needed here, then
    encoder = load_encoder(
        settings.model, threads=settings.threads, provider="cpu" if far else settings.provider
    )
    provider = cast("Provider", settings.provider) if far else encoder.provider
    engine = None
    if settings.engine == "ray":
        own: dict[str, Any] = settings.model_dump(include=set(_OF_RAY))
        beside = place if isinstance(place, Path) else Path()
        own["shards"] = (settings.shards or beside / f".{name}.shards").absolute()
        engine = RayEngine(model=settings.model.absolute(), spec=encoder.spec, provider=provider, **own)
    split, rule = settings.split, encoder.spec.split
    rows = select(catalog, split, rule)
    began = time.monotonic()
    # The index is made once, at the end; rebuilding it on the way would only take time from the encoder.
    with galleries_at(place, policy=RebuildPolicy(automatic=False)) as directory:
        kind: dict[str, Any] = settings.model_dump(include={"thumbnails", "index", "recall"})
        target = Target(directory, name, encoder.spec, **kind)
        before = kinds_by_field(target.gallery) if target.gallery else {}
        more: dict[str, Any] = settings.model_dump(include={"split", "sync", "batch", "threads"})
        report = index_rows(encoder, catalog, rows, target, engine=engine, **more)
        if engine and settings.shards is None:  # all that is in them is stored
            engine.forget()
        missing = select_missing(catalog, split, rule)
        absent = [Skipped(path, path, "the data set names it, and it is not there") for path in missing]
        file = settings.report or (place / name / FILE_NAME if isinstance(place, Path) else None)
        if file is not None and file.parent.is_dir():
            _write_report(file, report.skipped + absent)
        if len(report.skipped) == len(rows):
            raise BadData(
                f"none of the {len(rows)} images of {settings.data} can be indexed; the first,"
                f" {report.skipped[0].key}: {report.skipped[0].reason}"
            )
        gallery = target.made()
        turned = _turned(before, kinds_by_field(gallery))
        if settings.map != "none" and isinstance(gallery, Gallery):
            with stages("item") as advance:
                make_map(gallery, settings.map, progress=advance)
        info = gallery.info()
        wanted = (info.wanted_index, info.wanted_recall)
        is_other = (settings.index or wanted[0], settings.recall or wanted[1]) != wanted
        if isinstance(place, str):
            if report.stored or report.updated or report.deleted:
                gallery.rebuild(whole=False)
        elif info.fresh or info.deleted or is_other:
            with stages("item") as advance:
                gallery.rebuild(index=settings.index, recall=settings.recall, whole=False, progress=advance)
        pairs = []
        if settings.fail_above is not None:
            with stages("item") as advance:
                pairs = gallery.duplicates(settings.fail_above, progress=advance)
    seconds = time.monotonic() - began
    return {
        "gallery": f"{place}/{name}",
        "model": encoder.spec.name,
        "provider": provider,
        "root": str(catalog.root),
        "format": catalog.format,
        "table": None if catalog.table is None else str(catalog.table),
        "labels": len({row.label for row in rows} - {""}),
        "images": len(rows) + len(absent),
        **asdict(report),
        "skipped": [asdict(each) for each in report.skipped + absent],
        "unlabelled": catalog.unlabelled if split != "all" else 0,
        "passed_over": dict(catalog.passed_over),
        "left_out": dict(catalog.left_out),
        "notes": [*catalog.notes, *catalog.texts, *turned],
        "empty": list(catalog.empty),
        "report": str(file) if file and (report.skipped or absent) else None,
        "items": info.items,
        "duplicates": [asdict(pair) for pair in pairs],
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
        ("deleted", "deleted: {} items that the data set has no more"),
        ("changed", "changed: {} images, whose items were left as they are; --sync updates them"),
        ("gone", "gone: {} items that the data set has no more were left as they are; --sync deletes them"),
        ("kept", "kept: items of an earlier run of {} images that are skipped now"),
        ("unlabelled", "left out: {} images of no class, which are on no side of the split"),
    ):
        if result[field]:
            lines.append(text.format(result[field]))
    lines += [*tell_unread(result["passed_over"], result["left_out"]), *result["notes"]]
    skipped = [f"{each['path']}: {each['reason']}" for each in result["skipped"]]
    lines += some("conflicts, settled as the data set has it", result["conflicts"], "--json lists all")
    by = f", by {result['report']}" if result["report"] else ""
    lines += some(f"skipped{by}", skipped, "--json lists all, too")
    lines += some("folders without an image", result["empty"], "--json lists all")
    return "\n".join(lines)


def complaint(result: dict[str, Any]) -> str | None:
    """Return the sentence to end with where items are nearly alike that were not to be."""
    pairs = result["duplicates"]
    if not pairs:
        return None
    best = max(pairs, key=lambda pair: pair["score"])
    count = "1 pair" if len(pairs) == 1 else f"{len(pairs):,} pairs"
    place, _, name = result["gallery"].rpartition("/")
    return (
        f"{count} of items of {result['gallery']} score what --fail-above says or more, such as "
        f"{best['key']} and {best['other']} ({best['score']:.4f}); all items are stored: look at the pairs "
        f"by `crossbatch gallery duplicates {name} --galleries {shlex.quote(place)} --above ...`, or --json"
    )


def _turned(before: Mapping[str, Sequence[str]], now: Mapping[str, Sequence[str]]) -> list[str]:
    """Tell which fields of a gallery hold values of another kind than they did."""
    return [
        f"the gallery's field {name} held {' or '.join(before[name])} values, and new ones are"
        f" {' or '.join(each for each in kinds if each not in before[name])}:"
        " filters find only values of the kind that they name"
        for name, kinds in now.items()
        if before.get(name) and not {*kinds} <= {*before[name]}
    ]


def some(title: str, entries: list[str], where_all: str) -> list[str]:
    """Return a title with the number of its entries, and the first of them."""
    lines = [f"{title}: {len(entries)}", *(f"  {entry}" for entry in entries[:_SHOWN])] if entries else []
    more = len(entries) - _SHOWN
    return [*lines, f"  and {more} more ({where_all})"] if more > 0 else lines


def _place(settings: Settings) -> tuple[Path | str, str]:
    """Return the place of galleries and the name of the one to fill."""
    if "/" in settings.gallery and "galleries" in settings.model_fields_set:
        raise BadSetting(f"with --galleries, give the gallery's name alone; {settings.gallery} is a path")
    place, name = placed(settings.gallery, settings.galleries)
    return place, check_name(name)


def _check_report(path: Path) -> None:
    """Refuse a place for the report where it cannot be: in no folder, or over a file that is no report."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            first = file.readline(100).strip()
    except OSError as error:
        if isinstance(error, FileNotFoundError) and path.parent.is_dir():
            return
        raise BadSetting(f"the report {path} cannot be written: {cause_of(error)}") from error
    if first not in ("", _HEADER):
        raise BadSetting(f"{path} is there and is no report of crossbatch index; give another --report")


def _write_report(path: Path, skipped: list[Skipped]) -> None:
    """Write the report as CSV, complete or not at all; where nothing was skipped, remove it."""
    try:
        if not skipped:
            path.unlink(missing_ok=True)
            return
        with written_aside(path) as aside, aside.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([_HEADER.split(","), *map(astuple, skipped)])
    except OSError as error:
        raise disk_error(error, f"the report {path}") from error
