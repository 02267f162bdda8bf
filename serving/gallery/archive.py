"""Archives: a gallery in one file, and a gallery from one.

A snapshot is a gallery file of one state, without an index; what is restored of it is a gallery of its own,
with another id. Both are made aside, verified, and then put in their places at once.
"""

import os
import shutil
from contextlib import closing
from pathlib import Path

from serving.errors import BadArtifact, InvalidArgument, NotFound, Unavailable
from serving.gallery.disk import written_once
from serving.gallery.folder import check_path, made_aside
from serving.gallery.gallery import Gallery, RebuildPolicy
from serving.gallery.index.builder import Advance
from serving.gallery.store.schema import FILE_NAME
from serving.gallery.store.store import Store
from serving.gallery.verify import verify

__all__ = ["restore", "snapshot", "unpack"]


def snapshot(path: Path, file: Path, *, advance: Advance = lambda *_: None) -> int:
    """Write the gallery at `path` to a new file, while writes go on, and verify it; returns how many items.

    The file appears whole and on disk, or not at all. BadArtifact tells that the gallery is damaged.
    """
    check_path(file)
    with closing(Store(path / FILE_NAME)) as store, written_once(file) as aside:
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
    if not os.access(file, os.R_OK):
        raise Unavailable(f"the snapshot {file} cannot be read: permission denied; make it readable")
    with made_aside(path) as aside:
        given = aside / "given"
        shutil.copyfile(file, given)
        return unpack(given, aside, of=file, advance=advance)


def unpack(given: Path, folder: Path, *, of: Path, advance: Advance = lambda *_: None) -> int:
    """Make a gallery in a folder, with its index, of a copy of the snapshot `of`, which is removed."""
    try:
        found = verify(given, advance=advance)
        if found.problems:
            raise BadArtifact(
                f"the snapshot {of} is damaged and was not restored: {found.problems[0]}; use another one"
            )
        with closing(Store(given)) as store:
            store.copy_to(folder / FILE_NAME)
    except BadArtifact as error:
        raise BadArtifact(str(error).replace(str(given), str(of))) from error
    given.unlink()
    with closing(Gallery.open(folder, policy=RebuildPolicy(automatic=False))) as gallery:
        gallery.rebuild(progress=advance)
    return found.items
