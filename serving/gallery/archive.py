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

__all__ = ["copy_indexed", "restore", "snapshot"]


def snapshot(path: Path, file: Path, *, advance: Advance = lambda *_: None) -> int:
    """Write the gallery at `path` to a new file, while writes go on, and verify it; returns how many items.

    The file appears whole and on disk, or not at all. BadArtifact tells that the gallery is damaged.
    """
    check_path(file)
    with closing(Store(path / FILE_NAME)) as store, written_once(file) as aside:
        store.copy_to(aside)
        return _verified(path, aside, advance)


def copy_indexed(path: Path, folder: Path, *, advance: Advance = lambda *_: None) -> tuple[list[Path], int]:
    """Copy a gallery of one state, with its index, while writes go on, and verify it.

    Returns the files in the folder, which is empty before, and how many items; raises as `snapshot` does, and
    Unavailable where the index was made anew meanwhile.
    """
    files = [folder / FILE_NAME]
    with closing(Store(path / FILE_NAME)) as store:
        store.copy_to(files[0], indexed=True)
    with closing(Store(files[0])) as store, store.read() as reader:
        index = reader.state().index_file
    if index:
        files += [folder / index, (folder / index).with_suffix(".columns")]
    try:
        for each in files[1:]:
            os.link(path / each.name, each)  # which stays, where it is removed there
    except FileNotFoundError as error:
        anew = f"try again, or make it anew by crossbatch gallery rebuild {path.name}"
        raise Unavailable(f"an index of the gallery {path.name} has just been replaced; {anew}") from error
    return files, _verified(path, folder, advance)


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


def _verified(path: Path, copy: Path, advance: Advance) -> int:
    """Verify the copy of a gallery; returns how many items it has."""
    found = verify(copy, advance=advance)
    if found.problems:
        raise BadArtifact(
            f"the gallery {path.name} is damaged, and no snapshot of it was written: {found.problems[0]}; "
            f"see crossbatch gallery verify {path.name}"
        )
    return found.items
