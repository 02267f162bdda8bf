"""The command `crossbatch index`: the images of a data set into a gallery.

Images are decoded in threads, a bounded number ahead of the encoder, and stored batch by batch in the order
of their keys. One that cannot be read is skipped and listed with its reason. An item's key is its row's, so
a second run replaces the same items; what is in the gallery besides stays. An item's URI is its image's path
from the data set's root: a gallery's readers learn nothing of the machine that filled it.
"""

import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from serving.catalog import Catalog, Format, Row, Split, read, select, select_missing
from serving.cores import usable_cores
from serving.errors import AlreadyExists, BadData, BadSetting, InvalidArgument, NotFound
from serving.gallery.directory import GalleryDirectory, check_name, split_path
from serving.gallery.gallery import Gallery, Item, RebuildPolicy
from serving.gallery.identity import ModelIdentity
from serving.gallery.item import check_item
from serving.model.encoder import Encoder
from serving.picture import Picture
from serving.progress import progress

__all__ = ["EncoderLike", "Report", "Settings", "Skipped", "index_rows", "render", "run"]

_SHOWN = 5


class Settings(BaseModel):
    """Settings of `crossbatch index`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    gallery: Path = Field(
        description="the gallery to fill, made if it is not there: a path (galleries/birds), "
        "or a name if --galleries is given",
        json_schema_extra={"positional": True},
    )
    model: Path = Field(description="the model file, as `crossbatch export` writes it")
    data: Path = Field(description="the data set: a folder, or a .csv table beside its images")
    galleries: Path | None = Field(default=None, description="the folder that holds the gallery")
    format: Format = Field(default="auto", description="how the data set is laid out; auto finds out")
    split: Split = Field(
        default="all",
        description="which images: all, or one side of the split that the model was trained with; query and "
        "gallery are those of the test side that the data set calls so",
    )
    batch: int = Field(default=32, ge=1, le=1024, description="images encoded at once")
    threads: int = Field(default=0, ge=0, le=256, description="threads that decode and encode; 0: one a core")
    device: Literal["cpu", "cuda"] = Field(default="cpu", description="where the model runs")


class EncoderLike(Protocol):
    """What indexing needs of a `serving.model.encoder.Encoder`."""

    @property
    def spec(self) -> ModelIdentity:
        """The model's own account."""

    def preprocess(self, data: bytes) -> NDArray[np.uint8]:
        """Decode one image to (S, S, 3)."""

    def encode(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Embed images (B, S, S, 3) as unit vectors (B, d)."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """An image that was not stored, and why."""

    key: str
    reason: str


@dataclass(slots=True)
class Report:
    """What indexing did."""

    stored: int = 0
    skipped: list[Skipped] = field(default_factory=list)


def run(settings: Settings) -> dict[str, Any]:
    """Index a data set.

    Returns:
        `gallery`, `model`, `root` (below which the items' URIs are paths), `images` found on the wanted side
        of the split, `stored`, `skipped` (key and reason of each), `unlabelled` (images of no class that the
        split left out), `empty` class folders, `items` now in the gallery, `seconds`, `images_per_second`.

    Raises:
        BadData: The data set cannot be read, or none of its images can.
        ModelMismatch: The gallery is of another model.
        CrossbatchError: The model or gallery is damaged, or the gallery cannot be written.
    """
    folder, name = _place(settings)
    catalog = read(settings.data, settings.format)
    encoder = Encoder(settings.model, threads=settings.threads, device=settings.device)
    rows = select(catalog, settings.split, encoder.spec.split)
    began = time.monotonic()
    # The index is made once, at the end; rebuilding it on the way would only take time from the encoder.
    with GalleryDirectory(folder, policy=RebuildPolicy(automatic=False)) as directory:
        report = index_rows(
            encoder, catalog, rows, directory, name, batch=settings.batch, threads=settings.threads
        )
        if not report.stored:
            first = report.skipped[0]
            raise BadData(
                f"none of the {len(rows)} images of {settings.data} can be indexed; "
                f"the first, {first.key}: {first.reason}"
            )
        gallery = directory.get(name)
        gallery.rebuild()
        items = gallery.info().items
    seconds = time.monotonic() - began
    missing = select_missing(catalog, settings.split, encoder.spec.split)
    absent = [Skipped(path, "the data set names it, and it is not there") for path in missing]
    return {
        "gallery": str(folder / name),
        "model": encoder.spec.name,
        "root": str(catalog.root),
        "images": len(rows) + len(absent),
        "stored": report.stored,
        "skipped": [asdict(each) for each in report.skipped + absent],
        "unlabelled": catalog.unlabelled if settings.split != "all" else 0,
        "empty": list(catalog.empty),
        "items": items,
        "seconds": round(seconds, 3),
        "images_per_second": round(report.stored / seconds, 1),
    }


def render(result: dict[str, Any]) -> str:
    """Return what a person reads."""
    lines = [
        f"{result['gallery']}: stored {result['stored']} of {result['images']} images in "
        f"{result['seconds']:.1f} s ({result['images_per_second']:.0f} a second); "
        f"it holds {result['items']} items"
    ]
    if result["unlabelled"]:
        lines.append(
            f"left out: {result['unlabelled']} images of no class, which are on no side of the split"
        )
    skipped = [f"{each['key']}: {each['reason']}" for each in result["skipped"]]
    for title, entries in (("skipped", skipped), ("folders without an image", result["empty"])):
        if entries:
            lines.append(f"{title}: {len(entries)}")
            lines += [f"  {entry}" for entry in entries[:_SHOWN]]
        if len(entries) > _SHOWN:
            lines.append(f"  and {len(entries) - _SHOWN} more (--json lists all)")
    return "\n".join(lines)


def index_rows(
    encoder: EncoderLike,
    catalog: Catalog,
    rows: Sequence[Row],
    directory: GalleryDirectory,
    name: str,
    *,
    batch: int = 32,
    threads: int = 0,
) -> Report:
    """Embed rows of a catalogue and store them in a gallery, which is made when the first image is ready.

    Returns:
        How many were stored, each on disk, and which were skipped.

    Raises:
        ModelMismatch: The gallery is of another model.
        CrossbatchError: The gallery is damaged, or cannot be written.
    """
    report = Report()
    gallery = _existing(directory, name)
    if gallery is not None:
        gallery.check_model(encoder.spec)
    # One thread stores a batch while the next is encoded: the disk's confirmation takes milliseconds.
    steps: Iterable[None] = ()
    with (
        ThreadPoolExecutor(1) as writer,
        progress(steps, "index", total=len(rows), unit="image") as bar,
        closing(_embedded(encoder, catalog, rows, report.skipped, batch=batch, threads=threads)) as batches,
    ):
        writing: Future[list[int]] | None = None
        for items, passed in batches:
            bar.update(passed)
            if not items:
                continue
            if gallery is None:
                gallery = _made(directory, name, encoder.spec)
            report.stored += len(writing.result()) if writing else 0
            writing = writer.submit(gallery.upsert, items)
        report.stored += len(writing.result()) if writing else 0
        bar.update(len(rows) - bar.n)
    return report


def _embedded(
    encoder: EncoderLike,
    catalog: Catalog,
    rows: Sequence[Row],
    skipped: list[Skipped],
    *,
    batch: int,
    threads: int,
) -> Generator[tuple[list[Item], int]]:
    """Yield batches of checked items, and how many rows each stands for, those skipped included."""
    ready: list[tuple[Row, NDArray[np.uint8]]] = []
    passed = 0
    for row, pixels in _decoded(encoder, rows, ahead=2 * batch, threads=threads):
        passed += 1
        if isinstance(pixels, str):
            skipped.append(Skipped(row.key, pixels))
        else:
            ready.append((row, pixels))
        if len(ready) == batch:
            yield _items(encoder, catalog, ready, skipped), passed
            ready, passed = [], 0
    if ready:
        yield _items(encoder, catalog, ready, skipped), passed


def _items(
    encoder: EncoderLike,
    catalog: Catalog,
    ready: Sequence[tuple[Row, NDArray[np.uint8]]],
    skipped: list[Skipped],
) -> list[Item]:
    vectors = encoder.encode(np.stack([pixels for _, pixels in ready]))  # (B, d)
    items = []
    for (row, _), vector in zip(ready, vectors, strict=True):
        item = Item(row.key, vector, row.label, catalog.path_of(row), row.metadata)
        try:
            items.append(check_item(item, dimension=encoder.spec.dimension))
        except InvalidArgument as error:  # a path longer than a key may be, say
            skipped.append(Skipped(row.key, str(error)))
    return items


def _decoded(
    encoder: EncoderLike, rows: Sequence[Row], *, ahead: int, threads: int
) -> Iterator[tuple[Row, NDArray[np.uint8] | str]]:
    """Yield each row, in order, with its pixels (S, S, 3) or the reason why there are none."""
    pool = ThreadPoolExecutor(threads or usable_cores(), thread_name_prefix="decode")
    try:
        waiting: deque[tuple[Row, Future[NDArray[np.uint8] | str]]] = deque()
        for row in rows:
            waiting.append((row, pool.submit(_decode, encoder, row.image)))
            if len(waiting) > ahead:
                first, pixels = waiting.popleft()
                yield first, pixels.result()
        for first, pixels in waiting:
            yield first, pixels.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _decode(encoder: EncoderLike, picture: Picture) -> NDArray[np.uint8] | str:
    try:
        return encoder.preprocess(picture.read_bytes())
    except OSError as error:
        return f"the file cannot be read: {error.strerror or error}"
    except InvalidArgument as error:  # BadImage
        return str(error)


def _place(settings: Settings) -> tuple[Path, str]:
    """Return the folder of galleries and the name of the one to fill."""
    if settings.galleries is None:
        return split_path(settings.gallery)
    name = str(settings.gallery)
    if len(settings.gallery.parts) != 1:
        raise BadSetting(f"with --galleries, give the gallery's name alone; {name} is a path")
    return settings.galleries, check_name(name)


def _made(directory: GalleryDirectory, name: str, spec: ModelIdentity) -> Gallery:
    """Make the gallery, or take the one that another run has made since this one began."""
    try:
        return directory.create(
            name, model_name=spec.name, fingerprint=spec.fingerprint, dimension=spec.dimension
        )
    except AlreadyExists:
        gallery = _existing(directory, name)
        if gallery is None:  # it is something else that is in the way
            raise
        gallery.check_model(spec)
        return gallery


def _existing(directory: GalleryDirectory, name: str) -> Gallery | None:
    try:
        return directory.get(name)
    except NotFound:
        return None
