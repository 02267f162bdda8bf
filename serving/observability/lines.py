"""A file that several processes add whole lines to, and that others may rename away meanwhile."""

import errno
import logging
import os
from pathlib import Path

from serving.errors import CrossbatchError, Unavailable
from serving.gallery.disk import disk_error

__all__ = ["Lines"]

logger = logging.getLogger(__name__)


class Lines:
    """Adds lines to a file. Belongs to one thread at a time."""

    def __init__(self, path: Path) -> None:
        """Open the file, or make one that only its owner can read.

        Raises:
            CrossbatchError: if it cannot be written.
        """
        self.path = path.absolute()
        self._torn = False
        self._lost = 0
        try:
            self._descriptor = self._opened()
        except OSError as error:
            raise _refusal(error, f"the file {path}") from error

    def __str__(self) -> str:
        return str(self.path)

    def add(self, line: str) -> None:
        """Add a line whole, by one write; where that fails, say so in the log and lose it.

        Args:
            line: Without its end; ASCII, without a line break.
        """
        try:
            self._follow()
            # What is left of a line that had no room on the disk gets its end first.
            data = f"{chr(10) if self._torn else ''}{line}\n".encode()
            written = os.write(self._descriptor, data)
            self._torn = written < len(data)
            if self._torn:
                raise OSError(f"{written} of {len(data)} bytes had room")
        except OSError as error:
            if not self._lost:  # the first of a row
                logger.error("%s; calls go on, with their lines in the log only", _refusal(error, str(self)))
            self._lost += 1
        else:
            if self._lost:
                logger.warning("%s is written again; it lacks %d lines", self, self._lost)
                self._lost = 0

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def _opened(self) -> int:
        # To open a pipe would wait for its reader, and no signal would end the process meanwhile.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        descriptor = os.open(self.path, flags, 0o600)
        os.set_blocking(descriptor, True)  # a pipe or a terminal that is full for a moment loses no line
        return descriptor

    def _follow(self) -> None:
        """Go over to a new file when the one that is open was renamed or removed, as logrotate does."""
        ours = os.fstat(self._descriptor)
        try:
            there = os.stat(self.path)
        except FileNotFoundError:
            there = None
        if there is None or (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino):
            descriptor = self._opened()
            os.close(self._descriptor)
            self._descriptor, self._torn = descriptor, False


def _refusal(error: OSError, what: str) -> CrossbatchError:
    if error.errno == errno.ENXIO:
        return Unavailable(
            f"{what} cannot be written: it is a pipe that nobody reads, or a socket; "
            "start the reader of the pipe first, or give a file"
        )
    return disk_error(error, what)
