"""Exact search of queries in references, a block of queries at a time, for any number of neighbours."""

import torch
from torch import Tensor

__all__ = ["CHUNK", "RowSearch", "find_copies"]

CHUNK = 64  # references whose maximum is taken first, for maxima are fast
_SUMMED = 4096  # rows whose bits are weighed at once


class RowSearch:
    """Exact nearest references, block by block, in one buffer that the blocks share."""

    def __init__(self, queries: Tensor, gallery: Tensor | None = None) -> None:
        """Make ready; nothing is searched yet.

        Args:
            queries: Unit rows, float (N, d).
            gallery: References, unit rows, float (G, d); for each query all others when None.
        """
        self._itself = gallery is None
        self._queries = queries
        self._gallery = queries if gallery is None else gallery
        self._size = len(self._gallery)
        self.references = self._size - int(self._itself)  # per query
        self._copies, self._originals = find_copies(self._gallery)
        self._buffer = queries.new_empty(0)

    def nearest(self, rows: Tensor, depth: int) -> Tensor:
        """Rank the references of the queries `rows`, int64 (b,).

        Returns:
            Indices of the `depth` nearest, nearest first and equals by index, int64 (b, depth).
        """
        similarity = self._similarity(rows)  # (b, width)
        # One more than asked for shows whether the last place is shared.
        values, indices = _top(similarity, min(depth + 1, self.references))
        if values.shape[1] > depth:
            shared = torch.nonzero(values[:, depth - 1] == values[:, depth]).flatten()
            values, indices = values[:, :depth], indices[:, :depth]
            for some in torch.split(shared, CHUNK):
                values[some], indices[some] = _top_by_index(similarity[some], values[some, -1:], depth)
        # Most rows hold no equals, and are in order as they come.
        mixed = torch.nonzero((values[:, 1:] >= values[:, :-1]).any(dim=1)).flatten()
        indices[mixed] = _order(values[mixed], indices[mixed])
        return indices

    def _similarity(self, rows: Tensor) -> Tensor:
        """Cosine of queries and references, (b, width); -inf for each self and past the last reference."""
        width = -(-self._size // CHUNK) * CHUNK
        if self._buffer.numel() < len(rows) * width:
            self._buffer = self._gallery.new_empty(len(rows) * width)
        similarity = self._buffer[: len(rows) * width].view(len(rows), width)
        real = similarity[:, : self._size]
        torch.mm(self._queries[rows], self._gallery.T, out=real)
        # A product may round a column's last bit by its position: copies must tie exactly.
        if len(self._copies) > 0:
            real[:, self._copies] = real[:, self._originals]
        similarity[:, self._size :] = -torch.inf
        if self._itself:
            similarity[torch.arange(len(rows), device=rows.device), rows] = -torch.inf
        return similarity


def find_copies(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Find the rows that repeat an earlier one bit by bit.

    Returns:
        Their indices and those of the first row of each value, int64 (c,) both.
    """
    bits = vectors.view(torch.int64 if vectors.dtype == torch.float64 else torch.int32)
    # A sum that knows the order, or all permutations of a row would have one; integers wrap round.
    weights = torch.randint(-(2**63), 2**63 - 1, bits.shape[1:], generator=torch.Generator().manual_seed(0))
    weights = weights.to(vectors.device)
    sums = torch.cat([(some * weights).sum(dim=1) for some in torch.split(bits, _SUMMED)])
    _, group = torch.unique(sums, return_inverse=True)
    places = torch.arange(len(vectors), device=vectors.device)
    originals, rest = places.clone(), places
    # Equal sums need not be equal rows: those unlike the first of their sum are compared with the next.
    while len(rest) > 0:
        first = places.scatter_reduce(0, group[rest], rest, "amin", include_self=False)[group[rest]]
        rest, first = rest[rest != first], first[rest != first]
        same = (bits[rest] == bits[first]).all(dim=1)
        originals[rest[same]] = first[same]
        rest = rest[~same]
    copies = torch.nonzero(originals != places).flatten()
    return copies, originals[copies]


def _top(similarity: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Largest values of each row and where they are, in no given order among equals.

    The largest `count` values lie in the `count` chunks of largest maximum, and maxima are fast.
    """
    rows, width = similarity.shape
    chunks = width // CHUNK
    if count * 4 > chunks:
        return similarity.topk(count, dim=1)
    split = similarity.view(rows, chunks, CHUNK)
    best = split.amax(dim=2).topk(count, dim=1, sorted=False).indices  # (b, count)
    kept = split.gather(1, best[:, :, None].expand(-1, -1, CHUNK)).flatten(1)  # (b, count · chunk)
    values, places = kept.topk(count, dim=1)
    indices = best.gather(1, places // CHUNK) * CHUNK + places % CHUNK
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
