"""What indexing did, and the file that lists the images which could not be stored."""

import csv
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from serving.errors import BadSetting, cause_of
from serving.gallery.disk import disk_error, written_aside

__all__ = ["FILE_NAME", "Report", "Skipped", "check_report", "write_report"]

FILE_NAME = "skipped.csv"


@dataclass(frozen=True, slots=True)
class Skipped:
    """An image that was not stored, and why; `path` starts from the data set's root."""

    key: str
    path: str
    reason: str


@dataclass(slots=True)
class Report:
    """What indexing did; each row of the data set counts once, as one of the first five."""

    skipped: list[Skipped]
    stored: int = 0
    """Images that were embedded, each on disk."""
    updated: int = 0
    """Items of unchanged images whose label, URI or metadata was another."""
    unchanged: int = 0
    changed: int = 0
    """Items that are no longer of their file as it is now, and were left as they are."""
    kept: int = 0
    """Skipped images of which an item of an earlier run stays."""
    gone: int = 0
    """Items whose image is no longer in the data set, and which were left as they are."""
    deleted: int = 0


_HEADER = [each.name for each in fields(Skipped)]


def check_report(path: Path) -> None:
    """Refuse a place for the report where it cannot be: in no folder, or over a file that is no report."""
    if not path.parent.is_dir():
        raise BadSetting(f"there is no folder {path.parent} to write the report into; make it first")
    try:
        with path.open(encoding="utf-8", errors="replace", newline="") as file:
            first = next(csv.reader([file.readline(100)]), [])
    except FileNotFoundError:
        return
    except OSError as error:
        raise BadSetting(f"the report {path} cannot be written: {cause_of(error)}") from error
    if first not in ([], _HEADER):
        raise BadSetting(f"{path} is there and is no report of crossbatch index; give another --report")


def write_report(path: Path, skipped: list[Skipped]) -> None:
    """Write the report as CSV, complete or not at all; where nothing was skipped, remove it."""
    try:
        if not skipped:
            path.unlink(missing_ok=True)
            return
        with written_aside(path) as aside, aside.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([_HEADER, *map(astuple, skipped)])
    except OSError as error:
        raise disk_error(error, f"the report {path}") from error
