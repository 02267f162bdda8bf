"""Where an image's bytes are: a file, or a part of one; read whole, bounded, by any thread or process."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from serving.errors import BadImage
from serving.model.preprocess import MAX_BYTES

__all__ = ["File", "Member", "Picture", "check_length"]


def check_length(length: int) -> int:
    """Return the length of an image in bytes, or raise BadImage where it is longer than `MAX_BYTES`."""
    if length > MAX_BYTES:  # found before the bytes fill the memory
        raise BadImage(f"the file has {length} bytes; the limit is {MAX_BYTES}")
    return length


class Picture(Protocol):
    """An image that was there when the catalogue was read, and may hold anything.

    It compares by value and can be pickled for worker processes. As text it says where it is.
    """

    @property
    def path(self) -> Path:
        """Absolute; of a part of a file the file and, as if that were a folder, the name of the part."""

    def read_bytes(self) -> bytes:
        """Return the whole image file.

        Raises:
            BadImage: It is longer than `MAX_BYTES`.
            OSError: It cannot be read, not whole, or its file has changed since it was listed.
        """

    def stamp(self) -> tuple[int, int]:
        """Return size in bytes and time of change in nanoseconds: with other bytes, one of them is another.

        Of a part, the time is that of the file that holds it. Raises OSError where it is not there.
        """


@dataclass(frozen=True, slots=True)
class File:
    """An image that is a file of its own."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def read_bytes(self) -> bytes:
        """Return the bytes of the file."""
        with open(self.path, "rb") as file:
            length = check_length(os.fstat(file.fileno()).st_size)
            data = file.read(length + 1)
        if len(data) != length:
            raise OSError(f"{self.path} has {length} bytes and not the {len(data)} that were read")
        return data

    def stamp(self) -> tuple[int, int]:
        """Return size in bytes and time of change in nanoseconds."""
        found = os.stat(self.path)
        return found.st_size, found.st_mtime_ns


@dataclass(frozen=True, slots=True)
class Member:
    """An image that lies in a file with others, in one piece and as it is: in a tar, say."""

    archive: Path
    name: str
    offset: int
    size: int
    mtime_ns: int
    """Time of the archive's last change when its members were listed."""

    def __str__(self) -> str:
        return str(self.path)

    @property
    def path(self) -> Path:
        """The member's path, as if the archive were a folder."""
        return self.archive / self.name

    def read_bytes(self) -> bytes:
        """Return the bytes of the member, if the archive is the one that was listed."""
        check_length(self.size)
        with open(self.archive, "rb") as file:
            if os.fstat(file.fileno()).st_mtime_ns != self.mtime_ns:
                raise OSError(f"{self.archive} has changed since its members were listed")
            file.seek(self.offset)
            data = file.read(self.size)
        if len(data) < self.size:
            raise OSError(f"{self.path} has {self.size} bytes, of which {len(data)} could be read")
        return data

    def stamp(self) -> tuple[int, int]:
        """Return the member's size in bytes and the archive's time of change in nanoseconds."""
        return self.size, self.mtime_ns
