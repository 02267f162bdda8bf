"""Archives: a gallery in one file, and a gallery from one.

A snapshot is a gallery file of one state, without an index; what is restored of it is a gallery of its own,
with another id. Both are made aside, verified, and then put in their places at once.
"""

import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from serving.errors import AlreadyExists, BadArtifact, InvalidArgument, NotFound, Unavailable
from serving.gallery.disk import disk_error, sync
from serving.gallery.folder import check_path, made_aside
from serving.gallery.gallery import Gallery, RebuildPolicy
from serving.gallery.index.builder import Advance
from serving.gallery.store.schema import FILE_NAME
from serving.gallery.store.store import Store
from serving.gallery.verify import verify

__all__ = ["restore", "snapshot"]

_STALE = 3600.0  # seconds


def snapshot(path: Path, file: Path, *, advance: Advance = lambda *_: None) -> int:
    """Write the gallery at `path` to a new file, while writes go on, and verify it; returns how many items.

    The file appears whole and on disk, or not at all. BadArtifact tells that the gallery is damaged.
    """
    check_path(file)
    with closing(Store(path / FILE_NAME)) as store, _written_once(file) as aside:
        store.copy_to(aside)
        found = verify(aside, advance=advance)
        if found.problems:
            raise BadArtifact(
                f"the gallery {path.name} is damaged, and no snapshot of it was written: "
                f"{found.problems[0]}; see crossbatch gallery verify {path.name}"
            )
    return found.items


def restore(file: Path, path: Path, *, advance: Advance = lambda *_: None) -> int:
    """Make a gallery at `path` of a snapshot and build its index; returns how many items it has.

    The gallery appears complete or not at all. BadArtifact tells that the snapshot is damaged, or of another
    format version, InvalidArgument that it is the file of a gallery in use.
    """
    if not file.is_file():
        raise NotFound(f"there is no snapshot {file}; give a file that crossbatch gallery snapshot wrote")
    if file.with_name(f"{file.name}-wal").exists():
        raise InvalidArgument(
            f"{file} is a gallery in use and not all of it is in that file; make a snapshot of the gallery "
            "by crossbatch gallery snapshot"
        )
    with made_aside(path) as aside:
        given = aside / "given"
        if not os.access(file, os.R_OK):
            raise Unavailable(f"the snapshot {file} cannot be read: permission denied; make it readable")
        shutil.copyfile(file, given)
        try:
            found = verify(given, advance=advance)
            if found.problems:
                raise BadArtifact(
                    f"the snapshot {file} is damaged and was not restored: {found.problems[0]}; "
                    "use another one"
                )
            with closing(Store(given)) as store:
                store.copy_to(aside / FILE_NAME)
        except BadArtifact as error:
            raise BadArtifact(str(error).replace(str(given), str(file))) from error
        given.unlink()
        with closing(Gallery.open(aside, policy=RebuildPolicy(automatic=False))) as gallery:
            gallery.rebuild(progress=advance)
    return found.items


@contextmanager
def _written_once(file: Path) -> Iterator[Path]:
    """Give a path to write a file to; when the block ends it is at `file`, on disk, unless one is there."""
    taken = f"there is already something at {file}; choose another name, or remove it first"
    if not file.parent.is_dir():
        raise NotFound(f"there is no folder {file.parent} to write {file.name} to; make it first")
    if os.path.lexists(file):
        raise AlreadyExists(taken)
    for path in file.parent.glob(f".{file.name}.new-*"):  # what a crash has left
        with suppress(OSError):
            if path.stat().st_mtime < time.time() - _STALE:
                shutil.rmtree(path)
    folder = file.with_name(f".{file.name}.new-{secrets.token_hex(4)}")
    aside = folder / file.name
    try:
        folder.mkdir(0o700)
        yield aside
        aside.chmod(aside.stat().st_mode & 0o644)
        sync(aside)
        _put(aside, file)
        sync(file.parent)
    except FileExistsError as error:
        raise AlreadyExists(taken) from error
    except OSError as error:
        raise disk_error(error, f"the file {file}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _put(aside: Path, file: Path) -> None:
    """Give a file its name, never that of another file."""
    try:
        os.link(aside, file)
    except FileExistsError:
        raise
    except OSError:  # the file system has no links
        os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))  # nobody else takes it now
        os.replace(aside, file)
