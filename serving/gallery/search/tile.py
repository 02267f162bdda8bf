"""Tiles of a gallery's map: the points of a square of it, the same ones of the same items at every depth."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.errors import Mismatch
from serving.gallery.search.filter import LABEL
from serving.gallery.search.snapshot import Snapshot
from serving.gallery.store.transaction import Reader

__all__ = ["MAP_X", "MAP_Y", "MAX_POINTS", "MAX_ZOOM", "Tile", "map_tile"]

MAP_X, MAP_Y = "map_x", "map_y"
"""Fields of the metadata with an item's place on the map, in [0, 1] from the left and from the top."""
MAX_POINTS = 4000
"""Most points of a tile."""
MAX_ZOOM = 20
"""How often the map can be halved: a float32 below 1 tells apart sixteen places in such a tile."""
_MOST_TEXT = 200  # characters of a value: it is there to tell colours apart


@dataclass(frozen=True, slots=True)
class Tile:
    """What is to be seen of a square of the map; the p points are the same whatever field is asked for."""

    points: NDArray[np.float32]  # (p, 2): x and y on the whole map
    keys: list[str]
    values: list[str]  # the different ones of the field, sorted; empty for those that have none
    value_of: NDArray[np.uint16]  # (p,): which of them each item has first; (0,) without a field
    items: int  # in the square


def map_tile(snapshot: Snapshot, reader: Reader, zoom: int, column: int, row: int, field: str = "") -> Tile:
    """Return the tile of a column and a row, of the 2^zoom that there are of each, `zoom` at most `MAX_ZOOM`.

    What lies between two tiles is of the right and of the lower one. Mismatch tells that no item has a place
    on the map.
    """
    x, y, alive = snapshot.numbers(MAP_X), snapshot.numbers(MAP_Y), ~snapshot.dead
    found = np.flatnonzero(_within(x, zoom, column) & _within(y, zoom, row) & alive)
    if not len(found) and not (_within(x, 0, 0) & _within(y, 0, 0) & alive).any():
        name = reader.path.parent.name
        make = f"make one by `crossbatch gallery map {name}`"
        raise Mismatch(f"no item of the gallery {name} has a place on a map; {make}")
    seqs = snapshot.seqs(found)
    first = _first(seqs)
    shown = seqs[first]
    points = np.stack([x[found[first]], y[found[first]]], axis=1)
    rows = snapshot.rows.find(set(shown.tolist()), reader)
    texts = [rows[seq] for seq in shown.tolist()]
    values, value_of = list[str](), np.empty(0, np.int64)
    if field and texts:
        held = [_text(label if field == LABEL else metadata.get(field)) for _, label, _, metadata in texts]
        values = sorted({*held})
        numbers = {value: number for number, value in enumerate(values)}
        value_of = np.array([numbers[value] for value in held])
    keys = [key for key, *_ in texts]
    return Tile(points, keys, values, value_of.astype(np.uint16), len(found))


def _within(numbers: NDArray[np.float32], zoom: int, place: int) -> NDArray[np.bool_]:
    """Tell which of numbers (n,) lie in one of the 2^zoom parts of [0, 1]; bounds are exact in float32."""
    least, end = np.float32(place / (1 << zoom)), np.float32((place + 1) / (1 << zoom))
    return (numbers >= least) & ((numbers <= end) if end == 1 else (numbers < end))


def _first(seqs: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where those of seqs (n,) are that a tile shows, the foremost first, at most `MAX_POINTS`.

    Which come before others does not depend on the tile: of what is shown here a deeper tile leaves out none.
    """
    mixed = seqs.astype(np.uint64)  # so that they look drawn by lot; no two become one
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(32)
    mixed *= np.uint64(0x94D049BB133111EB)
    best = np.arange(len(seqs))
    if len(seqs) > 2 * MAX_POINTS:  # about twice as many as are wanted are below this: few to sort
        few = np.flatnonzero(mixed < np.uint64((2 * MAX_POINTS << 64) // len(seqs)))
        best = few if len(few) >= MAX_POINTS else best
    first: NDArray[np.int64] = best[np.argsort(mixed[best])][:MAX_POINTS]
    return first


def _text(value: Any) -> str:
    """Return the first value that a field holds as text; empty where that is none."""
    if isinstance(value, list):
        value = next((each for each in value if each is not None), None)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value)[:_MOST_TEXT] if isinstance(value, str | int | float) else ""
