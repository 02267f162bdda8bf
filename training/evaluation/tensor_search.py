"""Exact search by torch, arrays in and out: of any queries in a gallery, or of a set in itself in pairs.

Of a set in itself only tiles on and above the diagonal need be multiplied: half of the product, which is
nearly all of the time. Each tile is offered to the images of its rows and, turned, to those of its columns.
References come to every image in the order of their indices, so that what is only as good as the last one
kept may be passed over.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from training.evaluation.metrics import find_originals

__all__ = ["PairSearch", "RowSearch", "open_search"]

_CHUNK = 64  # references whose maximum is taken first, for maxima are fast
_ROWS, _COLUMNS = 512, 4096  # of a tile of pairs: 8 MiB of float32
_KEPT_BYTES = 128 * 2**20  # for the neighbours of a whole set, where it is searched in pairs


def open_search(
    queries: NDArray[Any], gallery: NDArray[Any] | None, depth: int
) -> Callable[[NDArray[np.int64], int], NDArray[np.int64]]:
    """Choose the search: in pairs where a set is searched in itself for few neighbours, which is faster.

    Takes unit rows, float (N, d), their references, float (G, d), or None for all others, and the most
    neighbours that will be asked for. What it gives takes queries (b,) and how many neighbours are wanted, to
    the nearest first and equals by index, (b, depth).
    """
    asked, search = torch.from_numpy(queries), None
    kept = len(queries) * depth * (queries.itemsize + 4)
    if gallery is None and depth * _CHUNK <= len(queries) and kept <= _KEPT_BYTES:
        search = PairSearch(asked, depth=depth)
    found = search or RowSearch(asked, None if gallery is None else torch.from_numpy(gallery))
    return lambda rows, depth: found.nearest(torch.from_numpy(rows), depth).numpy()


class PairSearch:
    """The `depth` nearest others of every image of a set, found at once and kept."""

    def __init__(self, vectors: Tensor, *, depth: int) -> None:
        """Search among unit rows, float (N, d), for the most neighbours that will be asked for, below N."""
        self._values = vectors.new_full((len(vectors), depth), -torch.inf)  # falling
        self._indices = torch.full((len(vectors), depth), -1, dtype=torch.int32)
        self._by_rows = RowSearch(vectors)
        self._copied = torch.zeros(len(vectors), dtype=torch.bool)
        self._copied[torch.cat(self._by_rows.copies)] = True
        tile = vectors.new_empty(_ROWS * _COLUMNS)
        for rows in _panels(len(vectors)):
            own = _product(vectors[rows], vectors[rows], tile)
            own.diagonal().fill_(-torch.inf)
            self._offer_rows(rows.start, own, rows.start)
            for start in range(rows.stop, len(vectors), _COLUMNS):
                columns = vectors[start : start + _COLUMNS]
                similarity = _product(vectors[rows], columns, tile)
                self._offer_rows(rows.start, similarity, start)
                # Only the last panel is of odd height, and no columns are left for it.
                chunks = similarity[:, : len(columns)].view(-1, _CHUNK, len(columns))
                self._offer(start, chunks.permute(2, 0, 1), chunks.amax(dim=1).T, rows.start)

    def nearest(self, rows: Tensor, depth: int) -> Tensor:
        """Rank the others of the images `rows`, int64 (b,), nearest first and equals by index, (b, depth)."""
        found = self._indices[rows, :depth].long()
        # A product may round equal columns differently by their places, which a search by rows can mend.
        mixed = torch.nonzero(self._copied[found].any(dim=1)).flatten()
        if len(mixed) > 0:
            found[mixed] = self._by_rows.nearest(rows[mixed], depth)
        return found

    def _offer_rows(self, start: int, similarity: Tensor, first: int) -> None:
        chunks = similarity.view(len(similarity), -1, _CHUNK)
        self._offer(start, chunks, chunks.amax(dim=2), first)

    def _offer(self, start: int, split: Tensor, maxima: Tensor, first: int) -> None:
        """Offer references from index `first` on, higher than all before, to q images from `start` on.

        `split` has the similarities, (q, chunks, CHUNK), and `maxima` the largest of each chunk, (q, chunks).
        """
        images = slice(start, start + len(split))
        last = self._values[images, -1]  # only what is above it is kept, (q,)
        image, chunk = torch.nonzero(maxima > last[:, None], as_tuple=True)
        found = split[image, chunk]  # (f, CHUNK)
        row, place = torch.nonzero(found > last[image, None], as_tuple=True)
        if len(row) == 0:
            return
        image, index = image[row], first + chunk[row] * _CHUNK + place  # by image, then by index
        touched, which, counts = torch.unique_consecutive(image, return_inverse=True, return_counts=True)
        column = torch.arange(len(row)) - (counts.cumsum(0) - counts)[which]
        depth, width = self._values.shape[1], int(counts.max())
        values = found.new_full((len(touched), depth + width), -torch.inf)
        indices = self._indices.new_full(values.shape, -1)
        values[:, :depth], indices[:, :depth] = self._values[images][touched], self._indices[images][touched]
        values[which, depth + column], indices[which, depth + column] = found[row, place], index.int()
        values, order = values.sort(dim=1, descending=True, stable=True)
        self._values[images][touched] = values[:, :depth]
        self._indices[images][touched] = indices.gather(1, order[:, :depth])


def _panels(count: int) -> Iterator[slice]:
    """Cut images into panels of rows, the first ones low: what they keep spares sorting in the next."""
    start, height = 0, _CHUNK
    while start < count:
        stop = min(start + height, count)
        yield slice(start, stop)
        start, height = stop, min(2 * height, _ROWS)


def _product(rows: Tensor, columns: Tensor, memory: Tensor) -> Tensor:
    """Cosines of unit rows, the columns filled up with -inf to whole chunks; a view of `memory`."""
    width = -(-len(columns) // _CHUNK) * _CHUNK
    tile = memory[: len(rows) * width].view(len(rows), width)
    torch.mm(rows, columns.T, out=tile[:, : len(columns)])
    tile[:, len(columns) :] = -torch.inf
    return tile


class RowSearch:
    """Exact nearest references, however many, block by block, in one buffer that the blocks share."""

    def __init__(self, queries: Tensor, gallery: Tensor | None = None) -> None:
        """Make ready to search unit rows, float (N, d), in others (G, d), or each in all others when None."""
        self._itself = gallery is None
        self._queries = queries
        self._gallery = queries if gallery is None else gallery
        self._size = len(self._gallery)
        originals = torch.from_numpy(find_originals(self._gallery.numpy()))
        copies = torch.nonzero(originals != torch.arange(self._size)).flatten()
        self.copies = copies, originals[copies]
        self._buffer = queries.new_empty(0)

    def nearest(self, rows: Tensor, depth: int) -> Tensor:
        """Rank the references of the queries `rows`, int64 (b,), nearest first, equals by index."""
        similarity = self._similarity(rows)  # (b, width)
        # One more than asked for shows whether the last place is shared.
        values, indices = _top(similarity, min(depth + 1, self._size - int(self._itself)))
        if values.shape[1] > depth:
            shared = torch.nonzero(values[:, depth - 1] == values[:, depth]).flatten()
            values, indices = values[:, :depth], indices[:, :depth]
            for some in torch.split(shared, _CHUNK):
                values[some], indices[some] = _top_by_index(similarity[some], values[some, -1:], depth)
        # Most rows hold no equals, and are in order as they come.
        mixed = torch.nonzero((values[:, 1:] >= values[:, :-1]).any(dim=1)).flatten()
        indices[mixed] = _order(values[mixed], indices[mixed])
        return indices

    def _similarity(self, rows: Tensor) -> Tensor:
        """Cosine of queries and references, (b, width); -inf for each self and past the last reference."""
        width = -(-self._size // _CHUNK) * _CHUNK
        if self._buffer.numel() < len(rows) * width:
            self._buffer = self._gallery.new_empty(len(rows) * width)
        similarity = self._buffer[: len(rows) * width].view(len(rows), width)
        real = similarity[:, : self._size]
        torch.mm(self._queries[rows], self._gallery.T, out=real)
        # A product may round a column's last bit by its position: copies must tie exactly.
        copies, originals = self.copies
        if len(copies) > 0:
            real[:, copies] = real[:, originals]
        similarity[:, self._size :] = -torch.inf
        if self._itself:
            similarity[torch.arange(len(rows)), rows] = -torch.inf
        return similarity


def _top(similarity: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Largest values of each row and where they are, in no given order among equals."""
    rows, width = similarity.shape
    chunks = width // _CHUNK
    if count * 4 > chunks:
        return similarity.topk(count, dim=1)
    # they lie in the `count` chunks of largest maximum, and maxima are fast
    split = similarity.view(rows, chunks, _CHUNK)
    best = split.amax(dim=2).topk(count, dim=1, sorted=False).indices  # (b, count)
    kept = split.gather(1, best[:, :, None].expand(-1, -1, _CHUNK)).flatten(1)  # (b, count · chunk)
    values, places = kept.topk(count, dim=1)
    indices = best.gather(1, places // _CHUNK) * _CHUNK + places % _CHUNK
    return values, indices


def _top_by_index(similarity: Tensor, last: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Settle a shared last place: all values above `last` (b, 1), then its equals of lowest index."""
    above, equal = similarity > last, similarity == last
    room = count - above.sum(dim=1, keepdim=True)
    kept = above | (equal & (equal.cumsum(dim=1, dtype=torch.int32) <= room))
    indices = kept.nonzero()[:, 1].view(-1, count)
    return similarity.gather(1, indices), indices


def _order(values: Tensor, indices: Tensor) -> Tensor:
    """Sort indices by falling value, equals by index."""
    indices, by_index = indices.sort(dim=1)
    by_value = values.gather(1, by_index).argsort(dim=1, descending=True, stable=True)
    return indices.gather(1, by_value)
