"""A map of a gallery: each item's place in the plane, near those that are like it, kept in its metadata.

The places are written by ordinary updates, so that a range filter finds what lies in a part of the map.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from serving.errors import BadSetting, Conflict, InvalidArgument, NotFound
from serving.gallery.disk import gallery_error
from serving.gallery.gallery import Gallery
from serving.gallery.index.builder import Advance
from serving.gallery.item import GalleryItem, ItemChange
from serving.gallery.lock import alone
from serving.gallery.search.snapshot import Snapshot
from serving.gallery.search.tile import MAP_X, MAP_Y

__all__ = ["MapMethod", "MapReport", "make_map", "on_square", "principal_axes"]

MapMethod = Literal["pca", "umap"]

_ROWS = 8192  # vectors that are worked on at once
_AT_ONCE = 1024  # items that are written together
_TURN = 600.0  # seconds to wait for a rebuild or a switch
_DIGITS = 6  # of a place
_STILL = 0.001  # an item that moves by less stays where it was: a new map of much the same items writes few
_OUTER = 0.001  # the share of items, at each end of an axis, that do not count for the scale
_MARGIN = 0.05  # as a share of half the width: where those are
_SAME = 1e-6  # spread below which vectors differ by their rounding alone
_MOST_DIMENSION = 4096  # for PCA: its covariance takes 128 MiB
_FITTED = 20_000  # most items that UMAP is fitted to; it puts the others among them
_FEWEST = 16  # items below which UMAP has too few neighbours, and PCA is taken


@dataclass(frozen=True, slots=True)
class MapReport:
    """What making a map did."""

    method: MapMethod
    items: int  # that have a place
    moved: int  # of them: those whose place was written, as it is another than before
    left_out: int  # written or deleted by others meanwhile, or without room in their metadata


def make_map(
    gallery: Gallery, method: MapMethod = "pca", *, progress: Advance = lambda *_: None
) -> MapReport:
    """Give each item its `map_x` and `map_y`, in [0, 1] from the left and from the top.

    All else of an item stays. One that another writer changes meanwhile keeps what that wrote and gets no
    place. To the index each item that was written is a new one; it is not made anew, nor by others meanwhile.
    BadSetting tells that umap-learn is not installed, or that the vectors are too long for PCA.
    """
    with gallery.reading() as (snapshot, _):
        live = np.flatnonzero(~snapshot.dead)
    seqs, dimension = snapshot.seqs(live), gallery.meta.dimension
    if not len(live):
        return MapReport(method, 0, 0, 0)
    if method == "umap":
        umap = _umap()
        if len(live) >= _FEWEST:
            places = _embedded(umap, snapshot, live, progress)
        else:
            method = "pca"
    if method == "pca":
        if dimension > _MOST_DIMENSION:
            raise BadSetting(
                f"the vectors of the gallery {gallery.name} have {dimension} components, and a map by pca"
                f" takes {_MOST_DIMENSION} at most; make it by umap"
            )
        mean, axes = principal_axes(_rows(snapshot, live, "axes", progress), dimension)
        flat = [(rows - mean) @ axes for rows in _rows(snapshot, live, "places", progress)]
        places = np.concatenate(flat)
    return _written(gallery, method, seqs, np.round(on_square(places), _DIGITS), progress)


def principal_axes(
    blocks: Iterable[NDArray[np.float32]], dimension: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the mean (d,) of the rows of blocks (b, d), and the directions (d, 2) in which they vary most.

    Of each the largest component is positive; the second one is zero where d is 1.
    """
    count, total, products = 0, np.zeros(dimension), np.zeros((dimension, dimension))
    for block in blocks:
        wide = block.astype(np.float64)
        count, total = count + len(wide), total + wide.sum(axis=0)
        products += wide.T @ wide
    mean = total / count
    vectors = np.linalg.eigh(products / count - np.outer(mean, mean))[1]
    axes = np.zeros((dimension, 2))
    axes[:, : min(2, dimension)] = vectors[:, ::-1][:, :2]
    largest = axes[np.abs(axes).argmax(axis=0), [0, 1]]
    return mean, axes * np.where(largest < 0, -1, 1)


def on_square(places: NDArray[np.float64]) -> NDArray[np.float64]:
    """Scale places (n, 2), n above 0, into [0, 1], both axes by one factor.

    Those of the outer thousandth at either end are drawn together at the border, in their order: one that
    lies far away leaves the others their room.
    """
    least, most = np.quantile(places, [_OUTER, 1 - _OUTER], axis=0)
    half = max(float((most - least).max()) / 2, _SAME)
    far = (places - (least + most) / 2) / half
    beyond = np.maximum(np.abs(far) - 1, 0)
    drawn = np.clip(far, -1, 1) + np.sign(far) * _MARGIN * beyond / (beyond + _MARGIN)
    scaled: NDArray[np.float64] = 0.5 + drawn / (2 + 2 * _MARGIN)
    return scaled


def _rows(
    snapshot: Snapshot, places: NDArray[np.int64], stage: str, progress: Advance
) -> Iterable[NDArray[np.float32]]:
    """Yield the vectors (b, d) at places (n,), some at a time."""
    for start in range(0, len(places), _ROWS):
        yield snapshot.vectors(places[start : start + _ROWS])
        progress(stage, min(start + _ROWS, len(places)), len(places))


def _umap() -> Any:
    try:
        from umap import UMAP
    except ModuleNotFoundError as error:
        raise BadSetting(
            "the map by umap needs the package umap-learn, which is not installed: "
            "pip install 'crossbatch[map]', or make it by pca"
        ) from error
    return UMAP


def _embedded(
    umap: Any, snapshot: Snapshot, live: NDArray[np.int64], progress: Advance
) -> NDArray[np.float64]:
    """Return the places (n, 2) of UMAP, fitted to some of the items at regular distances."""
    fitted = np.linspace(0, len(live) - 1, min(len(live), _FITTED)).astype(np.int64)
    progress("fit", 0, len(fitted))
    model = umap(n_neighbors=min(15, len(fitted) - 1), metric="cosine", random_state=0, n_jobs=1)
    places = np.empty((len(live), 2))
    places[fitted] = model.fit_transform(snapshot.vectors(live[fitted]))
    progress("fit", len(fitted), len(fitted))
    others = np.setdiff1d(np.arange(len(live)), fitted)
    start = 0
    for rows in _rows(snapshot, live[others], "places", progress):
        places[others[start : start + len(rows)]] = model.transform(rows)
        start += len(rows)
    return places


def _written(
    gallery: Gallery,
    method: MapMethod,
    seqs: NDArray[np.int64],
    places: NDArray[np.float64],
    progress: Advance,
) -> MapReport:
    """Write the places (n, 2) of the items of these versions (n,), ascending, where they are other ones."""
    kept = moved = 0
    after = ""
    try:
        with alone(gallery.path, _TURN, waiting=lambda: progress("wait", 0, 0)):  # no rebuild half way
            while items := gallery.list(after=after, limit=_AT_ONCE):
                at = np.searchsorted(seqs, [item.version for item in items])
                told = zip(seqs.take(at, mode="clip"), places.take(at, 0, mode="clip").tolist(), strict=True)
                known = [
                    (it, place) for it, (seq, place) in zip(items, told, strict=True) if it.version == seq
                ]
                changed = [each for each in known if not _is_still(each[0].metadata, each[1])]
                kept += len(known) - len(changed)
                moved += _update(gallery, changed)
                after = items[-1].key
                progress("write", kept + moved, len(seqs))
    except OSError as error:
        raise gallery_error(error, gallery.path) from error
    return MapReport(method, kept + moved, moved, len(seqs) - kept - moved)


def _is_still(metadata: Mapping[str, Any], place: Sequence[float]) -> bool:
    held: list[Any] = [metadata.get(name) for name in (MAP_X, MAP_Y)]
    pairs = zip(held, place, strict=True)
    return all(type(old) in (int, float) and abs(old - new) <= _STILL for old, new in pairs)


def _update(gallery: Gallery, changes: Sequence[tuple[GalleryItem, Sequence[float]]]) -> int:
    """Write the places of items that still are as they were read; return of how many."""
    while changes:
        wanted = [ItemChange(it.key, dict(zip((MAP_X, MAP_Y), place, strict=True))) for it, place in changes]
        try:
            return len(gallery.update(wanted, expected={it.key: it.version for it, _ in changes}))
        except (Conflict, NotFound):
            now = {key: it.version for key, it in gallery.find([it.key for it, _ in changes]).items()}
            changes = [each for each in changes if now.get(each[0].key) == each[0].version]
        except InvalidArgument:  # the metadata of one is full
            half = len(changes) // 2
            return sum(_update(gallery, some) for some in (changes[:half], changes[half:]) if half)
    return 0
