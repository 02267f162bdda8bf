"""What the state of a gallery says of its published index, guarded by a checksum of its own.

SQLite notices no altered byte in a number; here, one decides which items are searched for.
"""

import zlib

__all__ = ["PUBLISHED", "UNPUBLISHED", "publication_checksum"]

PUBLISHED = "index_file, index_checksum, index_count, covers_seq, covers_removal, index_facts"
"""The columns of the table state that are guarded, in order."""

UNPUBLISHED = ("", "", 0, 0, 0, "{}")
"""What stands in them while nothing is published."""


def publication_checksum(
    index_file: str, index_checksum: str, index_count: int, covers_seq: int, covers_removal: int, facts: str
) -> int:
    """Return the CRC-32 that these columns are stored with; a search reads it, so it must be cheap."""
    whole = f"{index_file}\0{index_checksum}\0{index_count}\0{covers_seq}\0{covers_removal}\0{facts}"
    return zlib.crc32(whole.encode())
