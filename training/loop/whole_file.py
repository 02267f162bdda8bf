"""Files that are written whole or not at all: aside first, flushed to the disk, then renamed.

What is written aside bears the number of its process, so that two that write one file do not write into one
another's; and what a process left aside when it was killed is swept by the next.
"""

import contextlib
import os
from pathlib import Path

from serving.errors import CrossbatchError

__all__ = ["aside_of", "check_target", "has_ended", "is_aside", "sweep", "write_file"]

_SUFFIX = ".tmp"


def write_file(path: Path, contents: bytes) -> None:
    """Replace a file in one step, or leave the previous one as it is.

    Raises:
        CrossbatchError: If it cannot be written, the disk being full for one.
    """
    aside = aside_of(path)
    try:
        check_target(path)
        sweep(path)
        with aside.open("wb") as file:
            file.write(contents)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise CrossbatchError(
            f"{path} cannot be written ({(error.strerror or str(error)).lower()}); a previous one is"
            " unharmed: make room or choose another folder"
        ) from error


def check_target(path: Path) -> None:
    """Refuse to put a file in the place of something else, a device for one.

    Raises:
        OSError: If something is there that is no plain file.
    """
    if path.exists() and not path.is_file():
        raise OSError(0, "something is there that is no plain file", str(path))


def aside_of(path: Path) -> Path:
    """Tell where this process writes a file before it has its name."""
    return path.with_name(f".{path.name}.{os.getpid()}{_SUFFIX}")


def is_aside(name: str, of: str) -> bool:
    """Tell whether a name is that of a file which some process wrote aside for the file `of`."""
    number = name.removeprefix(f".{of}.").removesuffix(_SUFFIX)
    return number.isdecimal() and name == f".{of}.{number}{_SUFFIX}"


def sweep(path: Path) -> None:
    """Take away what processes left aside for a file when they were killed."""
    with contextlib.suppress(OSError):  # what cannot be taken away does no harm
        for file in path.parent.iterdir():
            if is_aside(file.name, path.name) and has_ended(int(file.name.split(".")[-2])):
                file.unlink(missing_ok=True)


def has_ended(process: int) -> bool:
    """Tell whether no process of this number runs here; where there is no telling, it is taken to run."""
    if os.name != "posix":  # elsewhere the signal 0 is not a question
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # another user's; no number of a process
        return False
    return False


def _sync_folder(path: Path) -> None:
    """Flush a rename to the disk, where the system lets a folder be opened."""
    with contextlib.suppress(PermissionError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
