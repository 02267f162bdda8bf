"""Exact search of a set in itself, for few neighbours: each product of two images serves both of them.

The similarity of a and b is that of b and a, so only tiles on and above the diagonal are multiplied: half of
the product, which is nearly all of the time. Each tile is offered to the images of its rows and, turned, to
those of its columns; an image keeps the best it was offered. References come to every image in the order of
their indices, so that what is only as good as the last one kept may be passed over.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from training.evaluation.row_search import CHUNK, find_copies

__all__ = ["PairSearch"]

_ROWS, _COLUMNS = 512, 4096  # of a tile: 8 MiB of float32


class PairSearch:
    """The `depth` nearest others of every image of a set, found at once and kept."""

    def __init__(self, vectors: Tensor, *, depth: int) -> None:
        """Search.

        Args:
            vectors: Unit rows, float (N, d).
            depth: Most neighbours that will be asked for, at most N - 1.
        """
        self.references = len(vectors) - 1
        copies, originals = find_copies(vectors)
        # A product may round equal columns differently by their places, so copies are searched only once.
        self._groups = _Groups(len(vectors), copies, originals) if len(copies) > 0 else None
        if self._groups is not None:
            vectors = vectors[self._groups.firsts]
        self._best = _Best(len(vectors), depth, vectors)
        _offer_all(vectors, self._best)

    def nearest(self, rows: Tensor, depth: int) -> Tensor:
        """Rank the others of the images `rows`, int64 (b,).

        Returns:
            Indices of the `depth` nearest, nearest first and equals by index, int64 (b, depth).
        """
        if self._groups is None:
            return self._best.indices[rows, :depth].long()
        distinct = self._groups.number[rows]
        values, indices = self._best.values[distinct], self._best.indices[distinct].long()
        parts = torch.arange(len(rows), device=rows.device)
        found = [
            self._groups.expand(rows[i], values[i], indices[i], depth) for i in torch.split(parts, CHUNK)
        ]
        return torch.cat(found)


class _Best:
    """The largest similarities that each image was offered, falling, and whose they are."""

    def __init__(self, count: int, depth: int, like: Tensor) -> None:
        self.values = like.new_full((count, depth), -torch.inf)
        self.indices = torch.full((count, depth), -1, dtype=torch.int32, device=like.device)

    def offer(self, start: int, split: Tensor, maxima: Tensor, first: int) -> None:
        """Offer references, all of higher index than those before, to the images from `start` on.

        Args:
            start: Index of the first of the q images.
            split: Similarities, float (q, chunks, CHUNK).
            maxima: Largest of each chunk, float (q, chunks).
            first: Index of the first reference.
        """
        images = slice(start, start + len(split))
        last = self.values[images, -1]  # only what is above it is kept, (q,)
        image, chunk = torch.nonzero(maxima > last[:, None], as_tuple=True)
        found = split[image, chunk]  # (f, CHUNK)
        row, place = torch.nonzero(found > last[image, None], as_tuple=True)
        if len(row) == 0:
            return
        image, index = image[row], first + chunk[row] * CHUNK + place  # by image, then by index
        touched, which, counts = torch.unique_consecutive(image, return_inverse=True, return_counts=True)
        column = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[which]
        depth, width = self.values.shape[1], int(counts.max())
        values = found.new_full((len(touched), depth + width), -torch.inf)
        indices = self.indices.new_full(values.shape, -1)
        values[:, :depth], indices[:, :depth] = self.values[images][touched], self.indices[images][touched]
        values[which, depth + column], indices[which, depth + column] = found[row, place], index.int()
        values, order = values.sort(dim=1, descending=True, stable=True)
        self.values[images][touched] = values[:, :depth]
        self.indices[images][touched] = indices.gather(1, order[:, :depth])


class _Groups:
    """Images that are copies of one another, each group standing for itself in a search."""

    def __init__(self, count: int, copies: Tensor, originals: Tensor) -> None:
        first = torch.arange(count, device=copies.device)
        first[copies] = originals
        # Numbers of the groups, int64 (N,), and the first image of each; these rise with the number.
        self.firsts, self.number, self.sizes = torch.unique(first, return_inverse=True, return_counts=True)
        self.members = self.number.argsort(stable=True)  # by group, then by index
        self.starts = self.sizes.cumsum(0) - self.sizes

    def expand(self, rows: Tensor, values: Tensor, groups: Tensor, depth: int) -> Tensor:
        """Let the members of the nearest groups rank by similarity, equals by index.

        Args:
            rows: Images, int64 (b,).
            values: Similarities of the nearest other groups, float (b, k); -inf past the last.
            groups: Their numbers, int64 (b, k); -1 past the last.
            depth: How many images are wanted.

        Returns:
            Indices of the `depth` nearest images without the one itself, int64 (b, depth).
        """
        # An image's own copies are nearest of all.
        groups = torch.cat((self.number[rows, None], groups), dim=1)
        values = torch.cat((torch.full_like(values[:, :1], torch.inf), values), dim=1)
        # Of one group the `depth` lowest indices are enough, and one more for the image itself.
        reach = torch.arange(min(depth + 1, int(self.sizes.max())), device=rows.device)
        there = (groups >= 0)[..., None] & (reach < self.sizes[groups][..., None])  # (b, k + 1, reach)
        places = (self.starts[groups][..., None] + reach).clamp(max=len(self.members) - 1)
        images = self.members[places]
        there &= images != rows[:, None, None]
        images, values = images.flatten(1), torch.where(there, values[..., None], -torch.inf).flatten(1)
        images, by_index = images.sort(dim=1, stable=True)
        order = values.gather(1, by_index).argsort(dim=1, descending=True, stable=True)
        ranked: Tensor = images.gather(1, order[:, :depth])
        return ranked


def _offer_all(vectors: Tensor, best: _Best) -> None:
    """Multiply the tiles on and above the diagonal, and offer each to its rows and to its columns."""
    tile = vectors.new_empty(_ROWS * _COLUMNS)
    for rows in _panels(len(vectors)):
        own = _product(vectors[rows], vectors[rows], tile)
        own.diagonal().fill_(-torch.inf)
        _offer_rows(best, rows.start, own, rows.start)
        for start in range(rows.stop, len(vectors), _COLUMNS):
            columns = vectors[start : start + _COLUMNS]
            similarity = _product(vectors[rows], columns, tile)
            _offer_rows(best, rows.start, similarity, start)
            # Only the last panel is of odd height, and no columns are left for it.
            chunks = similarity[:, : len(columns)].view(-1, CHUNK, len(columns))
            best.offer(start, chunks.permute(2, 0, 1), chunks.amax(dim=1).T, rows.start)


def _offer_rows(best: _Best, start: int, similarity: Tensor, first: int) -> None:
    chunks = similarity.view(len(similarity), -1, CHUNK)
    best.offer(start, chunks, chunks.amax(dim=2), first)


def _panels(count: int) -> Iterator[slice]:
    """Cut images into panels of rows, the first ones low: what they keep spares sorting in the next."""
    start, height = 0, CHUNK
    while start < count:
        stop = min(start + height, count)
        yield slice(start, stop)
        start, height = stop, min(2 * height, _ROWS)


def _product(rows: Tensor, columns: Tensor, memory: Tensor) -> Tensor:
    """Cosines of unit rows, the columns filled up with -inf to whole chunks; a view of `memory`."""
    width = -(-len(columns) // CHUNK) * CHUNK
    tile = memory[: len(rows) * width].view(len(rows), width)
    torch.mm(rows, columns.T, out=tile[:, : len(columns)])
    tile[:, len(columns) :] = -torch.inf
    return tile
