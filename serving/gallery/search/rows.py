"""What a hit shows beside its score, kept as it is stored, so that most hits need no row of the store."""

import json
import sys
import threading
from collections.abc import Set
from typing import Any

from serving.gallery.store.schema import sound
from serving.gallery.store.transaction import Reader, Texts

__all__ = ["Row", "RowCache"]

Row = tuple[str, str, str, dict[str, Any]]
"""Key, label, URI and metadata of an item."""

_MOST_BYTES = 1 << 25  # of one gallery
_BESIDE = 200  # bytes that an entry takes beside its texts: a tuple, a number, its place in a dictionary


class RowCache:
    """Texts of items that were found lately, by seq, of one gallery file; thread-safe.

    A replaced item has another seq, so what is kept of one never changes, and serves every state of that
    file. Metadata is kept as JSON: its size is known, and what a caller does to a hit stays with that hit.
    """

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        """Keep nothing yet, and never more than so many bytes and one item."""
        self._half = most_bytes // 2
        self._guard = threading.Lock()  # of writing to the three below
        self._newer: dict[int, Texts] = {}  # when they are half of what may be kept they become the older
        self._older: dict[int, Texts] = {}
        self._bytes = 0  # of the newer

    def find(self, seqs: Set[int], reader: Reader) -> dict[int, Row]:
        """Return the rows of items by their seqs, which are live in the reader's state."""
        newer, older = self._newer, self._older
        texts = {seq: newer[seq] for seq in seqs if seq in newer}
        if len(texts) < len(seqs):
            entering = {seq: older[seq] for seq in seqs - texts.keys() if seq in older}
            entering |= reader.texts(seqs - texts.keys() - entering.keys())
            self._keep(entering)
            texts |= entering
        with sound(reader.path, "an item that its index names"):
            metadata = json.loads(f"[{','.join([each[3] for each in texts.values()])}]")  # at once: quicker
            if not {*map(type, metadata)} <= {dict}:
                raise TypeError("its metadata is no JSON object")
            pairs = zip(texts.items(), metadata, strict=True)
            return {seq: (*each[:3], held) for (seq, each), held in pairs}

    def _keep(self, texts: dict[int, Texts]) -> None:
        with self._guard:
            for seq, each in texts.items():
                if seq in self._newer:
                    continue
                self._newer[seq] = each
                self._bytes += _BESIDE + sum(map(sys.getsizeof, each))
                if self._bytes >= self._half:
                    self._newer, self._older, self._bytes = {}, self._newer, 0
