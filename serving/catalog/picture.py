"""Where an image's bytes are: a file, or a part of one; read whole and bounded."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from serving.errors import BadImage
from serving.model.preprocess import MAX_BYTES

__all__ = ["File", "Member", "Picture", "check_length"]


class Picture(Protocol):
    """An image as it was listed; it compares by value, can be pickled, and as text says where it is."""

    @property
    def path(self) -> Path:
        """Absolute; of a part of a file as if that file were a folder."""

    def read_bytes(self) -> bytes:
        """Return the whole file; BadImage if longer than `MAX_BYTES`, OSError if unreadable or changed."""

    def stamp(self) -> tuple[int, int]:
        """Return size in bytes and time of change in nanoseconds; of a part, the time is that of its file."""


def check_length(length: int) -> None:
    """Refuse an image by its length in bytes, before it fills the memory."""
    if length > MAX_BYTES:
        raise BadImage(f"the file has {length} bytes; the limit is {MAX_BYTES}")


@dataclass(frozen=True, slots=True)
class File:
    """An image that is a file of its own."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def read_bytes(self) -> bytes:
        """Return the bytes of the file."""
        with open(self.path, "rb") as file:
            check_length(os.fstat(file.fileno()).st_size)
            return file.read()

    def stamp(self) -> tuple[int, int]:
        """Return size and time of change."""
        found = os.stat(self.path)
        return found.st_size, found.st_mtime_ns


@dataclass(frozen=True, slots=True)
class Member:
    """An image that lies in one piece in an archive, which was last changed at `mtime_ns`."""

    archive: Path
    name: str
    offset: int
    size: int
    mtime_ns: int

    def __str__(self) -> str:
        return str(self.path)

    @property
    def path(self) -> Path:
        """The member's path, as if the archive were a folder."""
        return self.archive / self.name

    def read_bytes(self) -> bytes:
        """Return the bytes of the member."""
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
        """Return the member's size and the archive's time of change."""
        return self.size, self.mtime_ns
